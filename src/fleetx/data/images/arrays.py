"""Small images in memory as a source: uint8 until they are on the device, and moved or flipped by their coordinates alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from ...config.kinds import Kind, boolean, integer, number, numbers
from ...errors import DataError
from ..draws import Floats, uniforms
from ..source import Indices
from .normalise import Normaliser

Bytes: TypeAlias = npt.NDArray[np.uint8]
Labels: TypeAlias = npt.NDArray[np.int64]

CROP_DRAWS = 3
"""Down, across, flip."""


def crops(padded: Bytes, indices: Indices, draws: Floats, *, pad: int, flip: bool) -> Bytes:
    """Of each padded image one window of its size without the padding, by draws in [0, 1); mirrored for half of the draws."""
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
    """Each image as size x size pixels, bilinear."""
    if images.shape[1:3] == (size, size):
        return images
    out = np.empty((len(images), size, size, images.shape[3]), dtype=np.uint8)
    for image, target in zip(images, out, strict=True):
        small = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
        target[...] = np.asarray(small.resize((size, size), Image.Resampling.BILINEAR)).reshape(target.shape)
    return out


@final
class ArrayImages:
    """Images [N, H, W, C] with 1 or 3 channels, resized once. A batch is (images [B, C, H, W], labels [B]).

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
        # The bytes stay as they lie, [B, H, W, C]: seen as NCHW, that is channels_last.
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
