"""Load images that need no download: the digits inside scikit-learn, and Fashion-MNIST where Debian's package is installed."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from ...config.kinds import Kind, boolean, choice, integer, number, numbers
from ...errors import ConfigError, DataError, did_you_mean
from ..source import Indices
from ..stateless_random import Floats, uniforms
from .augment import Normaliser

# --- A source of small images in memory: uint8 until they are on the device ---------------------------------------------

Bytes: TypeAlias = npt.NDArray[np.uint8]
Labels: TypeAlias = npt.NDArray[np.int64]

CROP_DRAWS = 3
"""Draws of one image: shift down, shift across, flip."""


def crops(padded: Bytes, indices: Indices, draws: Floats, *, pad: int, flip: bool) -> Bytes:
    """Cut one window of the original size out of each padded image, by draws in [0, 1); with `flip` half are mirrored."""
    height, width = padded.shape[1] - 2 * pad, padded.shape[2] - 2 * pad
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    windows = np.moveaxis(windows, 3, 5)  # [N, down, across, height, width, channel], all one view of `padded`
    down, across = (np.minimum((draws[:, :2] * (2 * pad + 1)).astype(np.int64), 2 * pad)).T
    chosen: Bytes = windows[indices, down, across]
    if flip:
        mirrored = draws[:, 2] < 0.5
        chosen[mirrored] = chosen[mirrored, :, ::-1]
    return chosen


def resized(images: Bytes, size: int) -> Bytes:
    """Resize each image to size x size pixels, bilinear."""
    if images.shape[1:3] == (size, size):
        return images
    out = np.empty((len(images), size, size, images.shape[3]), dtype=np.uint8)
    for image, target in zip(images, out, strict=True):
        small = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
        target[...] = np.asarray(small.resize((size, size), Image.Resampling.BILINEAR)).reshape(target.shape)
    return out


@final
class ArrayImages:
    """Serve images [N, H, W, C] with 1 or 3 channels, resized once. A batch is (images [B, C, H, W], labels [B]).

    `augment`: a window of the image with `pad` black pixels around it, and with `flip` its mirror image for every second one,
    as a pure function of (seed, epoch, index).
    """

    reads_files: ClassVar[bool] = False
    plans_batches: bool = False

    def __init__(
        self,
        images: npt.ArrayLike,
        labels: npt.ArrayLike,
        *,
        image_size: int,
        augment: bool,
        pad: int = 4,
        flip: bool = False,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        seed: int = 0,
        channels_last: bool = False,
        num_classes: int | None = None,
    ) -> None:
        pixels, self.labels = _checked_images(images), _checked_labels(labels)
        if len(pixels) != len(self.labels):
            raise DataError(f"there are {len(pixels)} images and {len(self.labels)} labels; each image needs one label.")
        self.image_size: int = integer(1).check("image_size", image_size)
        self.augment: bool = boolean().check("augment", augment)
        self.pad: int = integer(0).check("pad", pad) * self.augment
        self.flip: bool = boolean().check("flip", flip)
        self.seed: int = integer(0).check("seed", seed)
        self.channels_last: bool = boolean().check("channels_last", channels_last)
        self.num_classes = _checked_classes(self.labels, num_classes)
        self.mean = _per_channel("mean", mean, pixels.shape[3], number())
        self.std = _per_channel("std", std, pixels.shape[3], number(above=0.0))
        around = (self.pad, self.pad)
        self._padded = np.pad(resized(pixels, self.image_size), ((0, 0), around, around, (0, 0)))
        self._normalise = Normaliser(self.mean, self.std, channels_last=self.channels_last)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, epoch: int, indices: Indices) -> tuple[tuple[Tensor, Tensor], list[str]]:
        if self.augment:
            draws = uniforms(self.seed, epoch, indices[:, None], np.arange(CROP_DRAWS))
            pixels = crops(self._padded, indices, draws, pad=self.pad, flip=self.flip)
        else:
            pixels = self._padded[indices]
        # The bytes keep their layout [B, H, W, C]: viewed as NCHW, that is channels_last.
        return (torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(self.labels[indices])), []

    def finish(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return self._normalise(images), labels


def _checked_images(images: npt.ArrayLike) -> Bytes:
    pixels = np.asarray(images)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] not in (1, 3) or 0 in pixels.shape:
        raise DataError(f"the images are {pixels.dtype} of shape {list(pixels.shape)}; they must be uint8 [N, H, W, 1 or 3].")
    return pixels


def _checked_labels(labels: npt.ArrayLike) -> Labels:
    numbers_given = np.asarray(labels)
    if numbers_given.dtype.kind not in "iu" or numbers_given.ndim != 1:
        raise DataError(f"the labels are {numbers_given.dtype} of shape {list(numbers_given.shape)}; they must be integers [N].")
    return numbers_given.astype(np.int64)


def _checked_classes(labels: Labels, num_classes: int | None) -> int:
    classes: int = int(labels.max()) + 1 if num_classes is None else integer(1).check("num_classes", num_classes)
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        row = int(outside[0])
        raise DataError(f"image {row} has label {labels[row]}; labels must be from 0 to {classes - 1}.")
    return classes


def _per_channel(name: str, values: Sequence[float], channels: int, kind: Kind) -> list[float]:
    given: list[float] = numbers(kind).check(name, values)
    if len(given) not in {3, channels}:
        raise DataError(
            f"{name} has {len(given)} numbers for images of {channels} channels; it needs one for each channel, or three."
        )
    return given


# --- IDX files (MNIST's format), gzipped: a magic number, the sizes, then one byte for each element ---------------------

UNSIGNED_BYTE = 0x08
MOST_BYTES = 2**30
"""Limit on the unpacked size: a few gzipped bytes can expand to any size."""


def read_idx(path: str | os.PathLike[str], dimensions: int) -> npt.NDArray[np.uint8]:
    """Read the array. A file of another kind, truncated or too long, is a `DataError`."""
    try:
        with gzip.open(path) as file:
            return _read(file, path, dimensions)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file.") from None
    except EOFError:
        raise DataError(f"{path}: the file is cut short.") from None
    except (OSError, zlib.error) as error:  # gzip's own errors are OSErrors too
        raise DataError(f"{path}: it cannot be read as a gzip file: {error}.") from None


def _read(file: gzip.GzipFile, path: str | os.PathLike[str], dimensions: int) -> npt.NDArray[np.uint8]:
    magic, wanted = _exactly(file, 4), bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if magic != wanted:
        raise DataError(
            f"{path}: it begins with {magic.hex()}; an IDX file of bytes in {dimensions} dimensions with {wanted.hex()}."
        )
    shape = [int(size) for size in np.frombuffer(_exactly(file, 4 * dimensions), dtype=">u4")]
    size = math.prod(shape)
    if not 0 < size <= MOST_BYTES:
        raise DataError(f"{path}: its sizes are {shape}; allowed are 1 to {MOST_BYTES} bytes in all.")
    data = _exactly(file, size)
    if file.read(1):
        raise DataError(f"{path}: it goes on after the {size} bytes that its sizes {shape} promise.")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _exactly(file: gzip.GzipFile, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


# --- The built-in data sets ------------------------------------------------------------------------------------------------

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_VARIABLE = "FLEETX_FASHION_MNIST"
CLASSES = 10
SPLIT = choice("train", "test")
BRIGHTEST_DIGIT = 16
TEST_EVERY = 5
SMALL_IMAGE = 32


def digits(
    split: str = "train",
    *,
    image_size: int = SMALL_IMAGE,
    augment: bool | None = None,
    pad: int = 4,
    seed: int = 0,
    channels_last: bool = False,
) -> ArrayImages:
    """Load 1,797 handwritten digits of 8 x 8 pixels, enlarged. Every fifth is for testing. Never mirrored: that is no digit."""
    SPLIT.check("split", split)
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no stubs
    except ImportError:
        raise ConfigError('the digits are inside scikit-learn, which is missing; run `pip install "fleetx[demo]"`.') from None
    data = load_digits()
    pixels = np.rint(data.images * (255 / BRIGHTEST_DIGIT)).astype(np.uint8)
    chosen = (np.arange(len(pixels)) % TEST_EVERY == 0) == (split == "test")
    return ArrayImages(
        pixels[chosen][..., None],
        data.target[chosen],
        image_size=image_size,
        augment=split == "train" if augment is None else augment,
        pad=pad,
        mean=[0.305] * 3,
        std=[0.376] * 3,
        seed=seed,
        channels_last=channels_last,
        num_classes=CLASSES,
    )


def fashion_mnist(
    split: str = "train",
    *,
    image_size: int = SMALL_IMAGE,
    augment: bool | None = None,
    pad: int = 4,
    seed: int = 0,
    channels_last: bool = False,
) -> ArrayImages:
    """Load 70,000 pictures of clothes, 28 x 28 pixels, 10,000 for testing; from the folder FLEETX_FASHION_MNIST if set."""
    folder = Path(os.environ.get(FASHION_MNIST_VARIABLE) or FASHION_MNIST)
    prefix = {"train": "train", "test": "t10k"}[SPLIT.check("split", split)]
    images, labels = folder / f"{prefix}-images-idx3-ubyte.gz", folder / f"{prefix}-labels-idx1-ubyte.gz"
    if not images.exists():
        raise DataError(
            f"{images} is not there. Run `apt install dataset-fashion-mnist`, or set {FASHION_MNIST_VARIABLE} to a folder that "
            'has its files; the data "digits" needs neither.'
        )
    try:
        return ArrayImages(
            read_idx(images, 3)[..., None],
            read_idx(labels, 1),
            image_size=image_size,
            augment=split == "train" if augment is None else augment,
            pad=pad,
            flip=True,
            mean=[0.286] * 3,
            std=[0.353] * 3,
            seed=seed,
            channels_last=channels_last,
            num_classes=CLASSES,
        )
    except DataError as error:
        raise DataError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from None


BUILTIN: dict[str, Callable[..., ArrayImages]] = {"digits": digits, "fashion_mnist": fashion_mnist}


def builtin_images(name: str, split: str = "train", **options: Any) -> ArrayImages:
    """Load a built-in data set by its name, with its options (image_size, augment, pad, seed, channels_last)."""
    if name not in BUILTIN:
        raise ConfigError(
            f"there is no built-in data named {name!r}.{did_you_mean(str(name), BUILTIN)} There are: {', '.join(BUILTIN)}."
        )
    return BUILTIN[name](split, **options)
