"""Data sets of Hugging Face's `datasets`, as the loaders of the models read them: made here, nothing is downloaded."""

import numpy as np
import pytest
import torch
from PIL import Image

import fleetx as X
from fleetx.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets", reason="needs the library `datasets`: pip install datasets")

NAMES = ["ant", "bee", "cat"]
TINY = {"layers": 1, "hidden": 16, "heads": 2, "feed_forward": 32, "max_position": 32, "vocab_size": 300}


def picture(number):
    return Image.fromarray(np.full((40, 40, 3), (20 * number, 128, 64), dtype=np.uint8))


def photos(labels, names=NAMES, image="image", label="label"):
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({image: [picture(n) for n in range(len(labels))], label: labels}, features=features)


def seen(loader):
    """The number of each picture, read back from its colour, with its label."""
    return sorted(
        (round(((float(image[0, 16, 16]) * 0.229 + 0.485) * 255) / 20), int(label))
        for images, labels in loader
        for image, label in zip(images, labels, strict=True)
    )


@pytest.fixture(scope="module")
def model():
    return X.applications.Resnet20(num_classes=3)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_images_and_labels_are_read_and_decoded_here_with_any_number_of_workers(model):
    data = photos([0, 1, 2, 0, 1, 2])
    loader = model.get_train_dataloader(data, 3, workers=0)
    batches = list(loader)
    assert seen(batches) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)] and model.classes == tuple(NAMES)
    torch.testing.assert_close(list(model.get_train_dataloader(data, 3, workers=2)), batches, rtol=0, atol=0)
    model.loss(batches[0]).backward()


def test_selected_and_filtered_rows_and_any_format_give_the_same_pictures(model):
    data = photos([0, 1, 2, 0, 1, 2]).select([5, 1, 3]).with_format("torch")
    assert seen(model.get_train_dataloader(data, 3, workers=0)) == [(1, 1), (3, 0), (5, 2)]


def test_images_in_files_are_read_from_there_and_a_bad_one_is_named_by_its_row(model, tmp_path):
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, path in enumerate(paths):
        picture(number).save(path)
    data = datasets.Dataset.from_dict({"image": paths, "label": [0, 1, 2]}).cast_column("image", datasets.Image())
    assert seen(model.get_train_dataloader(data, 3, workers=0)) == [(0, 0), (1, 1), (2, 2)]
    (tmp_path / "1.png").write_bytes(b"x")
    with pytest.raises(DataError, match="row 1 of the data set: not an image of a known format"):
        list(model.get_train_dataloader(data, 3, workers=0))


def test_evaluation_takes_its_split_and_the_numbers_of_the_training_classes(model):
    data = datasets.DatasetDict(train=photos([0, 1, 2]), test=photos([0, 1], names=["cat", "bee"]))
    model.get_train_dataloader(data, 3)
    assert seen(model.get_val_dataloader(data, 3, workers=0)) == [(0, 2), (1, 1)]
    data["validation"] = photos([0], names=["dog"])
    with pytest.raises(DataError, match="the class 'dog', and the training data have not: theirs are 'ant', 'bee', 'cat'"):
        model.get_val_dataloader(data, 3)


def test_columns_of_other_names_are_found_where_there_is_one_of_the_kind(model):
    assert seen(model.get_train_dataloader(photos([0, 1, 2], image="picture", label="animal"), 3, workers=0))[0] == (0, 0)
    two = photos([0, 1, 2], label="coarse").add_column("fine", [0, 1, 2])
    with pytest.raises(ConfigError, match=r'can be the labels: coarse, fine. .*as by dataset.rename_column\("coarse", "label"\)'):
        model.get_train_dataloader(two, 3)
    with pytest.raises(ConfigError, match=r"no column of the data set can be the images; its columns are label \(ClassLabel\)"):
        model.get_train_dataloader(two.remove_columns(["image", "fine"]).rename_column("coarse", "label"), 3)


@pytest.mark.parametrize(
    "made,message",
    [
        (lambda: photos([0, 1, 2]).with_transform(dict), r"a transform of its own .*Pass dataset.with_format\(None\)"),
        (lambda: photos([0, 1, 2]).to_iterable_dataset(), "a streamed data set .* Load it without streaming=True"),
        (lambda: datasets.DatasetDict(test=photos([0])), "has the splits 'test', and no 'train'"),
        (lambda: photos([0, -1, 2]), r"row 1 of the data set has the label -1; labels must be from 0 to 2"),
        (lambda: photos([0, 1, 2]).select([]), "the data set has no rows"),
        (lambda: photos([3], names=[*NAMES, "dog"]), "has 4 classes, the model 3. Build the model with num_classes=4"),
    ],
)
def test_what_cannot_be_read_is_said_with_what_to_write(model, made, message):
    with pytest.raises((ConfigError, DataError), match=message):
        model.get_train_dataloader(made(), 1)


def texts(count):
    return [f"Sentence {n} has {n} words.\nThe next one has {n + 1} and ends here." for n in range(count)]


def test_rows_of_text_give_the_same_batches_as_files_of_the_same_text(tmp_path):
    (tmp_path / "files").mkdir()
    for number, text in enumerate(texts(40)):
        (tmp_path / "files" / f"{number:02}.txt").write_text(text)
    options = {"max_seq_len": 32, "batch_size": 4, "workers": 0, "cache_dir": tmp_path / "cache", "vocab_size": 300}
    model = X.applications.Bert_base(**TINY)
    of_files = list(model.get_train_dataloader(tmp_path / "files", **options))
    data = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": texts(40), "label": [0] * 40}),
        validation=datasets.Dataset.from_dict({"text": texts(8)}),
    )
    vocabulary = model.vocabulary_file
    of_rows = list(model.get_train_dataloader(data, vocab_path=vocabulary, **options))
    torch.testing.assert_close(of_rows, of_files, rtol=0, atol=0)
    model.loss(of_rows[0]).backward()
    assert sum(len(batch["input_ids"]) for batch in model.get_val_dataloader(data, **options)) == 8


def test_a_vocabulary_is_trained_on_the_rows_and_changed_rows_are_read_again(tmp_path):
    options = {"max_seq_len": 32, "batch_size": 4, "workers": 0, "cache_dir": tmp_path, "vocab_size": 300}
    model = X.applications.Bert_base(**TINY)
    first = model.get_train_dataloader(datasets.Dataset.from_dict({"body": texts(20)}), **options).source
    assert b"sentence" in model.vocabulary_file.read_bytes()
    again = model.get_train_dataloader(datasets.Dataset.from_dict({"other": texts(20)}), **options).source
    changed = model.get_train_dataloader(
        datasets.Dataset.from_dict({"body": [*texts(19), "Another one.\nOf two lines."]}), **options
    )
    assert first.digest == again.digest != changed.source.digest


@pytest.mark.parametrize(
    "rows,options,message",
    [
        ({"text": ["a b"], "label": [0]}, {"kind": "digital"}, 'kind="digital" is about files in a folder'),
        ({"text": ["a b"]}, {"suffixes": (".txt",)}, "suffixes=.* is about files in a folder"),
        ({"number": [1]}, {}, r"no column of the data set can be the text; its columns are number \(int64\)"),
        ({"text": ["a\0b"]}, {}, "row 0 of the data set holds a NUL byte"),
        ({"text": ["", " \n "]}, {}, "there is no text"),
    ],
)
def test_rows_without_text_are_said(tmp_path, rows, options, message):
    with pytest.raises((ConfigError, DataError), match=message):
        X.applications.Bert_base(**TINY).get_train_dataloader(
            datasets.Dataset.from_dict(rows), 1, max_seq_len=32, cache_dir=tmp_path, **options
        )
