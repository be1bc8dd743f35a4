"""Images in memory: moved by their coordinates alone, normalised on the device; and the data that needs no download."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleetx.data.images.builtin import FASHION_MNIST, ArrayImages, builtin_images, crops, digits, fashion_mnist, read_idx, resized
from fleetx.data.loader import Loader
from fleetx.data.stateless_random import uniforms
from fleetx.errors import ConfigError, DataError

RANDOM = np.random.default_rng(0).integers(0, 256, (6, 5, 5, 3), dtype=np.uint8)
LABELS = np.arange(6)


def source(**options: Any) -> ArrayImages:
    return ArrayImages(RANDOM, LABELS, **{"image_size": 5, "augment": True, "pad": 2, "flip": True} | options)


def pixels_of(images: torch.Tensor) -> np.ndarray:
    """[B, C, H, W] as [B, H, W, C]."""
    return images.permute(0, 2, 3, 1).numpy()


# Crops


def test_a_window_is_moved_by_its_draws_over_black_padding() -> None:
    image = np.arange(1, 5, dtype=np.uint8).reshape(1, 2, 2, 1)  # 1 2 / 3 4, with one black pixel around it
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)))
    draws = np.array([[0.0, 0.0, 0.9], [0.5, 0.5, 0.9], [0.99, 0.4, 0.9], [0.5, 0.5, 0.4]])
    chosen = crops(padded, np.zeros(4, dtype=np.int64), draws, pad=1, flip=True)[..., 0]
    assert chosen.tolist() == [[[0, 0], [0, 1]], [[1, 2], [3, 4]], [[3, 4], [0, 0]], [[2, 1], [4, 3]]]


def test_every_sample_is_moved_as_a_plain_loop_would_move_it() -> None:
    order = np.array([4, 0, 4, 2])
    (images, labels), complaints = source(seed=3).batch(7, order)
    for row, index in enumerate(order):
        draws = uniforms(3, 7, int(index), np.arange(3))
        down, across = int(draws[0] * 5), int(draws[1] * 5)
        expected = np.pad(RANDOM[index], ((2, 2), (2, 2), (0, 0)))[down : down + 5, across : across + 5]
        expected = expected[:, ::-1] if draws[2] < 0.5 else expected
        np.testing.assert_array_equal(pixels_of(images)[row], expected)
    assert labels.tolist() == [4, 0, 4, 2] and complaints == []


def test_a_sample_does_not_depend_on_its_batch_but_on_seed_and_epoch() -> None:
    def shown(seed: int, epoch: int, order: list[int]) -> np.ndarray:
        return pixels_of(source(seed=seed).batch(epoch, np.array(order))[0][0])

    np.testing.assert_array_equal(shown(0, 1, [5, 3])[1], shown(0, 1, [3])[0])
    everything = list(range(6))
    assert (shown(0, 1, everything) != shown(0, 2, everything)).any()
    assert (shown(0, 1, everything) != shown(1, 1, everything)).any()


def test_without_augmentation_images_are_as_they_are() -> None:
    (images, _), _ = source(augment=False).batch(3, np.array([1, 2]))
    np.testing.assert_array_equal(pixels_of(images), RANDOM[[1, 2]])


def test_all_offsets_and_both_directions_occur_equally_often() -> None:
    marked = np.arange(1, 4, dtype=np.uint8).reshape(1, 1, 3, 1)  # one row 1 2 3: its place and its order are seen at once
    padded = np.pad(marked, ((0, 0), (1, 1), (1, 1), (0, 0)))
    draws = uniforms(0, 0, np.arange(9000)[:, None], np.arange(3))
    rows = crops(padded, np.zeros(9000, dtype=np.int64), draws, pad=1, flip=True).reshape(9000, 3)
    counts = {tuple(row): int(n) for row, n in zip(*np.unique(rows, axis=0, return_counts=True), strict=True)}
    seen = [(0, 1, 2), (2, 1, 0), (1, 2, 3), (3, 2, 1), (2, 3, 0), (0, 3, 2)]
    # A third of the windows lies on the row; each of six cases has 500 of them, give or take five standard deviations.
    assert set(counts) == {(0, 0, 0), *seen}
    assert all(abs(counts[case] - 500) < 5 * 22 for case in seen)


# On the device


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_are_normalised_per_channel_in_the_layout_asked_for(channels_last: bool) -> None:
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 1.0]
    images = source(augment=False, mean=mean, std=std, channels_last=channels_last)
    batch, _ = images.batch(0, np.arange(6))
    assert batch[0].dtype == torch.uint8 and batch[0].is_contiguous(memory_format=torch.channels_last)
    finished, labels = images.finish(batch)
    reference = (RANDOM.astype(np.float64) / 255 - mean) / std
    np.testing.assert_allclose(pixels_of(finished), reference, rtol=0, atol=1e-6)
    assert finished.dtype == torch.float32 and labels.dtype == torch.int64
    assert finished.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_a_grey_image_becomes_three_equal_channels() -> None:
    grey = ArrayImages(RANDOM[..., :1], LABELS, image_size=5, augment=False)
    images, _ = grey.finish(grey.batch(0, np.array([3]))[0])
    assert images.shape == (1, 3, 5, 5)
    torch.testing.assert_close(images[:, 0], images[:, 2], rtol=0, atol=0)


def test_enlarging_keeps_flat_colours_and_averages_between_pixels() -> None:
    flat = np.full((1, 2, 2, 1), 77, dtype=np.uint8)
    assert (resized(flat, 8) == 77).all()
    edge = np.array([0, 100], dtype=np.uint8).reshape(1, 1, 2, 1).repeat(2, axis=1)
    assert resized(edge, 4)[0, 0, :, 0].tolist() == [0, 25, 75, 100]


# Refusals


@pytest.mark.parametrize(
    ("images", "labels", "options", "told"),
    [
        (RANDOM.astype(np.float32), LABELS, {}, "the images are float32 of shape [6, 5, 5, 3]; they must be uint8"),
        (RANDOM[..., 0], LABELS, {}, "the images are uint8 of shape [6, 5, 5]"),
        (RANDOM[..., :2], LABELS, {}, "the images are uint8 of shape [6, 5, 5, 2]"),
        (RANDOM[:0], LABELS[:0], {}, "the images are uint8 of shape [0, 5, 5, 3]"),
        (RANDOM, LABELS[:5], {}, "there are 6 images and 5 labels"),
        (RANDOM, LABELS / 2, {}, "the labels are float64 of shape [6]; they must be integers [N]."),
        (RANDOM, LABELS > 2, {}, "the labels are bool of shape [6]"),
        (RANDOM, LABELS, {"num_classes": 3}, "image 3 has label 3; labels must be from 0 to 2."),
        (RANDOM, LABELS - 1, {}, "image 0 has label -1; labels must be from 0 to 4."),
        (RANDOM, LABELS, {"std": (1, 1)}, "std has 2 numbers for images of 3 channels"),
    ],
)
def test_arrays_that_are_no_labelled_images_are_refused(images: Any, labels: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError) as caught:
        ArrayImages(images, labels, image_size=5, augment=False, **options)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_size", 0),
        ("augment", 1),
        ("pad", -1),
        ("pad", True),
        ("flip", None),
        ("seed", -1),
        ("std", (0, 1, 1)),
        ("mean", "0.5"),
    ],
)
def test_a_wrong_argument_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; it must be ".replace("(", r"\(").replace(")", r"\)")):
        source(**{name: value})


# The digits


def test_the_digits_are_split_into_four_fifths_and_one() -> None:
    train, test = digits("train"), digits("test")
    assert (len(train), len(test), train.num_classes) == (1437, 360, 10)
    assert (train.augment, test.augment, train.flip, train.image_size) == (True, False, False, 32)


def test_the_digits_are_scaled_to_bytes_and_normalised_about_zero() -> None:
    from sklearn.datasets import load_digits

    test, raw = digits("test", image_size=8), load_digits()
    (images, labels), _ = test.batch(0, np.arange(360))
    np.testing.assert_array_equal(pixels_of(images)[..., 0], np.rint(raw.images[::5] * 15.9375).astype(np.uint8))
    assert labels.tolist() == raw.target[::5].tolist()
    finished, _ = test.finish((images, labels))
    assert abs(float(finished.mean())) < 0.02 and abs(float(finished.std()) - 1) < 0.02


def test_a_loader_serves_the_digits(alone: None) -> None:
    batches = list(Loader(digits("test"), 128, shuffle=False))
    assert [tuple(images.shape) for images, _ in batches] == [(128, 3, 32, 32), (128, 3, 32, 32), (104, 3, 32, 32)]


def test_an_unknown_name_or_split_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="there is no built-in data named 'digit'. Did you mean `digits`"):
        builtin_images("digit")
    for name in ("digits", "fashion_mnist"):
        with pytest.raises(ConfigError, match="split is 'val'; it must be one of 'train', 'test'."):
            builtin_images(name, "val")
    assert len(builtin_images("digits", "test", image_size=16)) == 360


# Fashion-MNIST and its files


def write_idx(path: Path, array: np.ndarray) -> bytes:
    plain = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(plain))
    return plain


def test_an_idx_file_reads_back(tmp_path: Path) -> None:
    write_idx(tmp_path / "a.gz", RANDOM[..., 0])
    np.testing.assert_array_equal(read_idx(tmp_path / "a.gz", 3), RANDOM[..., 0])


def test_damaged_idx_files_are_refused_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    plain = write_idx(path, LABELS)
    packed = path.read_bytes()
    huge = plain[:4] + struct.pack(">I", 2**32 - 1) + plain[8:]
    damaged = {
        "the file is cut short": [gzip.compress(plain[:-1]), gzip.compress(plain[:6]), packed[:-9], packed[:20], b""],
        "it cannot be read as a gzip file": [plain, packed[:10] + b"\xff" + packed[11:], packed[:-8] + bytes(8)],
        "it begins with 00000803; an IDX file of bytes in 1 dimensions with 00000801": [
            gzip.compress(b"\0\0\x08\x03" + plain[4:])
        ],
        "it goes on after the 6 bytes that its sizes [6] promise": [gzip.compress(plain + b"\0")],
        "its sizes are [4294967295]; allowed are 1 to": [gzip.compress(huge)],
        "its sizes are [0]": [gzip.compress(plain[:4] + bytes(4))],
    }
    for told, files in damaged.items():
        for content in files:
            path.write_bytes(content)
            with pytest.raises(DataError) as caught:
                read_idx(path, 1)
            assert str(caught.value).startswith(f"{path}: ") and told in str(caught.value), content
    path.unlink()
    with pytest.raises(DataError, match="there is no such file"):
        read_idx(path, 1)


def test_fashion_mnist_is_read_from_the_folder_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETX_FASHION_MNIST", str(tmp_path))
    for prefix, count in (("train", 20), ("t10k", 10)):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", np.full((count, 28, 28), count))
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    train, test = fashion_mnist("train"), fashion_mnist("test", image_size=28)
    assert (len(train), len(test), train.image_size, train.augment, train.flip) == (20, 10, 32, True, True)
    (images, labels), _ = test.batch(0, np.array([9]))
    assert (images.unique().tolist(), labels.tolist()) == ([10], [9])


def test_labels_of_fashion_mnist_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETX_FASHION_MNIST", str(tmp_path))
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", np.zeros((3, 28, 28)))
    for labels, told in (
        ([1, 2], "there are 3 images and 2 labels"),
        ([1, 2, 10], "image 2 has label 10; labels must be from 0 to 9"),
    ):
        write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.array(labels))
        with pytest.raises(DataError, match=f"^{tmp_path}: {told}"):
            fashion_mnist("test")


def test_a_machine_without_fashion_mnist_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETX_FASHION_MNIST", str(tmp_path / "none"))
    with pytest.raises(DataError, match="Run `apt install dataset-fashion-mnist`, or set FLEETX_FASHION_MNIST"):
        fashion_mnist("train")


@pytest.mark.skipif(
    not Path(os.environ.get("FLEETX_FASHION_MNIST") or FASHION_MNIST).exists(), reason="dataset-fashion-mnist is not installed"
)
def test_debians_fashion_mnist_has_a_thousand_of_each_class_for_testing() -> None:
    test = fashion_mnist("test", image_size=28)
    assert np.bincount(test.labels).tolist() == [1000] * 10
    images, _ = test.finish(test.batch(0, np.arange(10000))[0])
    assert abs(float(images.mean())) < 0.01 and abs(float(images.std()) - 1) < 0.01
