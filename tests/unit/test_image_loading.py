"""The image models' own loaders: from a list, a folder, a .tar, built-in data; their options; training on them."""

import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

import fleetx as X
from fleetx import fleet
from fleetx.errors import ConfigError, DataError, FleetWarning

CLASSES = 3


@pytest.fixture
def folder(tmp_path):
    """Twelve 40x40 pictures, the red of each its number times twenty; `train.txt` lists them, `val.txt` the first four."""
    lines = []
    for number in range(12):
        pixels = np.full((40, 40, 3), (20 * number, 128, 64), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png {number % CLASSES}\n")
    (tmp_path / "train.txt").write_text("".join(lines))
    (tmp_path / "val.txt").write_text("".join(lines[:4]))
    return tmp_path


@pytest.fixture(scope="module")
def model():
    return X.applications.Resnet20(num_classes=CLASSES).to(fleet.device())


def red(images):
    """The numbers of the pictures, read back from their normalised colour in the middle."""
    return (((images[:, 0, 16, 16] * 0.229 + 0.485) * 255) / 20).round().int().tolist()


def test_the_seeds_call_reads_a_list_and_its_batches_fit_the_models_loss(folder, model):
    loader = model.load_imagenet_from_file(folder / "train.txt", batch_size=4, workers=0)
    batches = list(loader())
    assert len(batches) == len(loader) == 3
    images, labels = batches[0]
    assert images.shape == (4, 3, 32, 32) and images.dtype == torch.float32 and labels.dtype == torch.int64
    assert sorted(number for images, _ in batches for number in red(images)) == list(range(12))
    assert all(number % CLASSES == label for images, labels in batches for number, label in zip(red(images), labels, strict=True))
    model.loss(batches[0]).backward()


def test_a_tar_gives_the_same_bits_as_the_folder(folder, model, tmp_path):
    packed = tmp_path / "all.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(folder, arcname=".", filter=lambda member: None if member.name.endswith(".tar") else member)
    from_folder = list(model.get_train_dataloader(folder, 4, workers=0))
    for loader in (
        model.get_train_dataloader(packed, 4, workers=0),
        model.load_imagenet_from_file(folder / "train.txt", 4, root=packed, workers=0),
    ):
        for ours, theirs in zip(loader, from_folder, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_validation_reads_every_sample_once_in_order_and_not_augmented(folder, model):
    loader = model.get_val_dataloader(folder, 3, workers=0)
    first, second = list(loader), list(loader)
    assert [red(images) for images, _ in first] == [[0, 1, 2], [3]]
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    by_phase = model.load_imagenet_from_file(folder / "val.txt", 3, phase="val", workers=0)
    torch.testing.assert_close(first, list(by_phase), rtol=0, atol=0)


def test_channels_last_models_get_channels_last_batches(folder):
    for channels_last in (False, True):
        model = X.applications.Resnet20(num_classes=CLASSES, channels_last=channels_last)
        for data in (folder, "digits"):
            wide = model if data != "digits" else X.applications.Resnet20(channels_last=channels_last)
            images, _ = next(iter(wide.get_train_dataloader(data, 4, workers=0)))
            assert images.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_a_bad_image_is_an_error_that_names_list_and_line_or_is_skipped_up_to_a_share(folder, model):
    (folder / "7.png").write_bytes((folder / "7.png").read_bytes()[:50])
    with pytest.raises(DataError, match=r"train.txt, line 8: 7.png: .*"):
        list(model.get_train_dataloader(folder, 4, workers=0))
    with pytest.raises(DataError, match=r"line 8: .*bad sample 1 of the 12 of this pass; allowed is a share of 0.01"):
        list(model.get_train_dataloader(folder, 4, workers=0, on_bad_sample="skip"))
    with pytest.warns(FleetWarning, match=r"line 8: 7.png: .*The next readable sample takes its place"):
        batches = list(model.get_train_dataloader(folder, 4, workers=0, on_bad_sample=0.1))
    numbers = sorted(number for images, _ in batches for number in red(images))
    assert numbers == [0, 1, 2, 3, 4, 5, 6, 8, 8, 9, 10, 11]


@pytest.mark.parametrize(
    "options,message",
    [
        ({"worker": 2}, r"no option `worker`. Did you mean `workers`\?"),
        ({"on_bad_sample": "ignore"}, "on_bad_sample is 'ignore'"),
        ({"on_bad_sample": 1.5}, "on_bad_sample is 1.5"),
        ({"shuffle": 1}, "shuffle is 1; it must be True or False"),
        ({"mean": (0.5,)}, "mean"),
        ({"drop_last": "no"}, "drop_last is 'no'; it must be True or False"),
    ],
)
def test_options_no_loader_takes_are_named(folder, model, options, message):
    with pytest.raises(ConfigError, match=message):
        model.get_train_dataloader(folder, 4, **options)


def test_built_in_data_say_what_they_do_not_take_and_how_many_classes_they_have(model):
    with pytest.raises(ConfigError, match='"digits" has 10 classes, the model 3. Write Resnet20.num_classes=10, ...'):
        model.get_train_dataloader("digits", 4)
    with pytest.raises(ConfigError, match='built-in data "digits" has no option `flip`'):
        X.applications.Resnet20().get_train_dataloader("digits", 4, flip=True)


def test_data_that_are_not_there_are_said_with_what_could_be_meant(folder, model):
    with pytest.raises(DataError, match=r"'digts': there is no such file or folder. Did you mean `digits`\? .*\"fashion_mnist\""):
        model.get_train_dataloader("digts", 4)
    with pytest.raises(ConfigError, match="data is None; it must be a folder or a .tar of images, or a data set, or"):
        model.get_train_dataloader(None, 4)
    with pytest.raises(DataError, match="train.txt is a file, not a folder or a .tar. .*load_imagenet_from_file"):
        model.get_train_dataloader(folder / "train.txt", 4)


def test_labels_beyond_the_models_classes_are_an_error_that_names_the_line(folder):
    with pytest.raises(DataError, match="train.txt, line 3"):
        X.applications.Resnet20(num_classes=2).get_train_dataloader(folder, 4)


def test_training_in_order_gives_every_worker_equally_many(folder, model):
    loader = model.get_train_dataloader(folder, 4, shuffle=False, workers=0)
    assert [number for images, _ in loader for number in red(images)] == list(range(12))
    assert loader.sampler.drop_last


def test_the_built_in_data_train_and_evaluate_a_model():
    torch.manual_seed(0)
    model = X.applications.Resnet20(width=4).to(fleet.device())
    batch = next(iter(model.get_train_dataloader("digits", 32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(model.loss(batch))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.3
    scores = X.applications.evaluate(model, model.get_val_dataloader("digits", 120))
    assert scores["count"] == 360 and 0.0 <= scores["acc1"] <= scores["acc5"] <= 1.0
