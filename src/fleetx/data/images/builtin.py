"""Images that need no download: the digits inside scikit-learn, and Fashion-MNIST where Debian's package is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...config.kinds import choice
from ...errors import ConfigError, DataError, did_you_mean
from .arrays import ArrayImages
from .idx import read_idx

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
    """1,797 handwritten digits of 8 x 8 pixels, enlarged. Every fifth is for testing. Never mirrored: that is no digit."""
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
    """70,000 pictures of clothes of 28 x 28 pixels, 10,000 of them for testing; read from FLEETX_FASHION_MNIST if that is set."""
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
    """One of the data sets above by its name, with its own options (image_size, augment, pad, seed, channels_last)."""
    if name not in BUILTIN:
        raise ConfigError(
            f"there is no built-in data named {name!r}.{did_you_mean(str(name), BUILTIN)} There are: {', '.join(BUILTIN)}."
        )
    return BUILTIN[name](split, **options)
