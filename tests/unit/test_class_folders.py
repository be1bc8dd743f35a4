"""Images in folders of classes, `train/cat/0001.jpg`: how they are found, numbered, and told apart from what is no image."""

import os
import shutil
import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

import fleetx as X
from fleetx.errors import ConfigError, DataError, FleetWarning

TRAIN, VAL = {"bee": 3, "ant": 4, "cat": 2}, {"cat": 2, "ant": 1}


def write_class(folder, name, count, *, inside=""):
    """Pictures of one colour each; its red tells the class by the first letter, a = 40, b = 60 and so on."""
    place = folder / name / inside
    place.mkdir(parents=True, exist_ok=True)
    red = 40 + 20 * (ord(name[0]) - ord("a"))
    for number in range(count):
        Image.fromarray(np.full((40, 40, 3), (red, 128, 64), dtype=np.uint8)).save(place / f"{number}.PNG")


@pytest.fixture
def folder(tmp_path):
    for name, count in TRAIN.items():
        write_class(tmp_path / "photos" / "train", name, count, inside="from/a/phone" if name == "bee" else "")
    for name, count in VAL.items():
        write_class(tmp_path / "photos" / "val", name, count)
    return tmp_path / "photos"


@pytest.fixture(scope="module")
def model():
    return X.applications.Resnet20(num_classes=3)


def letters(loader):
    """What the pixels and what the labels say, for each image of a pass."""
    seen = []
    for images, labels in loader:
        red = ((images[:, 0, 16, 16].cpu() * 0.229 + 0.485) * 255).round().int().tolist()
        seen += [(chr(ord("a") + (value - 40) // 20), label) for value, label in zip(red, labels.tolist(), strict=True)]
    return Counter(seen)


def test_the_classes_are_numbered_by_their_names_and_each_image_has_its_own_label(folder, model):
    loader = model.get_train_dataloader(folder, 3, workers=0)
    assert letters(loader) == {("a", 0): 4, ("b", 1): 3, ("c", 2): 2}
    assert model.classes == ("ant", "bee", "cat")
    model.loss(next(iter(loader))).backward()


def test_evaluation_data_have_the_numbers_of_the_training_classes_though_they_lack_one(folder, model):
    assert letters(X.applications.Resnet20(num_classes=3).get_val_dataloader(folder, 2, workers=0)) == {("a", 0): 1, ("c", 2): 2}
    model.get_train_dataloader(folder / "train", 3)
    assert letters(model.get_val_dataloader(folder / "val", 2, workers=0)) == {("a", 0): 1, ("c", 2): 2}


@pytest.mark.parametrize("name", ["validation", "test"])
def test_validation_may_be_called_otherwise(folder, model, name):
    (folder / "val").rename(folder / name)
    assert letters(model.get_val_dataloader(folder, 2, workers=0)).total() == 3


@pytest.mark.parametrize("top", ["", "photos/"])
def test_a_tar_of_the_folder_gives_the_same_bits(folder, model, tmp_path, top):
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(folder, arcname=top or ".")
    for load in (model.get_train_dataloader, model.get_val_dataloader):
        torch.testing.assert_close(
            list(load(tmp_path / "photos.tar", 2, workers=0)), list(load(folder, 2, workers=0)), rtol=0, atol=0
        )


def test_files_that_are_no_images_are_left_out_with_a_warning_and_hidden_ones_without(folder, model):
    (folder / "train" / "ant" / ".DS_Store").write_bytes(b"x")
    (folder / "train" / ".cache").mkdir()
    model.get_train_dataloader(folder, 3)
    (folder / "train" / "ant" / "notes.txt").write_text("x")
    (folder / "train" / "stray.png").write_bytes(b"x")
    with pytest.warns(FleetWarning, match=r"train: 2 files are left out: 1 of no class, 1 of \.txt; expected one folder"):
        loader = model.get_train_dataloader(folder, 3, workers=0)
    assert letters(loader).total() == 9


def test_an_image_that_cannot_be_read_is_named_by_its_path(folder, model):
    (folder / "train" / "cat" / "1.PNG").write_bytes(b"x")
    with pytest.raises(DataError, match=r"photos/train: cat/1.PNG: not an image of a known format"):
        list(model.get_train_dataloader(folder, 3, workers=0))


def test_links_are_followed_but_never_in_a_circle(folder, model, tmp_path):
    write_class(tmp_path, "more", 2)
    os.symlink(tmp_path / "more", folder / "train" / "ant" / "more")
    os.symlink(folder / "train" / "ant", folder / "train" / "ant" / "again")
    entries = model.get_train_dataloader(folder, 3).source.entries
    assert Counter(entries.labels.tolist()) == {0: 6, 1: 3, 2: 2}


def test_what_is_missing_is_said(folder, model, tmp_path):
    with pytest.raises(ConfigError, match=r"train has 3 classes, the model 2. Build the model with num_classes=3"):
        X.applications.Resnet20(num_classes=2).get_train_dataloader(folder)
    (folder / "train" / "empty").mkdir()
    with pytest.raises(DataError, match="photos/train has no image of the class 'empty'. Remove"):
        model.get_train_dataloader(folder)
    write_class(folder / "val", "dog", 1)
    with pytest.raises(
        DataError, match="val has the class 'dog', and the training data have not: theirs are 'ant', 'bee', 'cat'"
    ):
        model.get_val_dataloader(folder)
    shutil.rmtree(folder / "val")
    with pytest.raises(DataError, match="photos has no val.txt nor test.txt: expected a list .* It has no val/CLASS nor"):
        model.get_val_dataloader(folder)
    with pytest.raises(DataError, match="For a folder of images write model.get_train_dataloader"):
        model.load_imagenet_from_file(folder)
    (tmp_path / "texts" / "ant").mkdir(parents=True)
    (tmp_path / "texts" / "ant" / "a.txt").write_text("x")
    with pytest.raises(DataError, match="texts holds no images: expected one folder for each class"):
        model.get_train_dataloader(tmp_path / "texts")


def test_images_beside_each_other_in_train_are_no_classes(model, tmp_path):
    for split in ("train", "test"):
        write_class(tmp_path, split, 3)
    with pytest.raises(DataError, match="has no train.txt: .* It has no train/CLASS either"):
        model.get_train_dataloader(tmp_path)


def test_a_list_comes_before_folders(folder, model):
    (folder / "train.txt").write_text("cat/0.PNG 0\n")
    assert letters(model.get_train_dataloader(folder, 1, workers=0)) == {("c", 0): 1}
    assert model.classes is None
    with pytest.raises(DataError, match="photos has no val.txt nor test.txt"):
        model.get_val_dataloader(folder)
