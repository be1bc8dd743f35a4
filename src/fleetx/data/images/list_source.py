"""Read, decode, crop and flip listed images into batches of uint8. Each image depends on (seed, epoch, its number) alone.

training     224: a random box scaled to 224 x 224     32: shifted by up to 4 pixels, black at the edges     both: mirrored or not
evaluation   224: short side to 256, central 224       32: as it is, or its central square scaled to 32

The workers send uint8; `finish` turns it into normalised floats on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, final

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from ...config.kinds import Kind, boolean, choice, integer, number, require
from ...errors import DataError
from ..packing import ALIGNMENT, empty_to_send
from ..source import Indices
from ..stateless_random import uniforms
from .augment import (
    CROP_DRAWS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normaliser,
    Pixels,
    central_box,
    evaluation_box,
    padded_crop_offset,
    resized_crop_box,
    shift_into,
)
from .decode import MAX_PIXELS, open_image, scaled, whole
from .files import ImageFiles
from .image_list import Numbers

OnBadSample: TypeAlias = Literal["raise", "skip"]
Batch: TypeAlias = tuple[Tensor, Tensor]
"""(images, labels)"""

SMALL_BELOW = 64
PAD = 4
MOST_REPLACEMENTS = 100
ROOM = 2 * ALIGNMENT


def training_view(image: Image, size: int, draws: Sequence[float], out: Pixels, *, mirrored: bool) -> None:
    """Write a random part of the image into `out`."""
    if size < SMALL_BELOW:
        pixels = fitted(image, size, mirrored=mirrored)
        shift_into(out, pixels, padded_crop_offset(draws[0], PAD), padded_crop_offset(draws[1], PAD))
    else:
        box = resized_crop_box(image.width, image.height, draws)
        out[...] = scaled(image, box, size, drafts=True, mirrored=mirrored)


def evaluation_view(image: Image, size: int, out: Pixels) -> None:
    """Write the central part of the image into `out`."""
    if size < SMALL_BELOW:
        out[...] = fitted(image, size)
    else:
        out[...] = scaled(image, evaluation_box(image.width, image.height, size), size, drafts=False)


def fitted(image: Image, size: int, *, mirrored: bool = False) -> Pixels:
    """Return the image itself where its size is right, else its central square, scaled."""
    if image.size == (size, size):
        return whole(image, mirrored=mirrored)
    return scaled(image, central_box(image.width, image.height, (1.0, 1.0)), size, drafts=False, mirrored=mirrored)


class Entries(Protocol):
    """The labels of all images, and their names for messages: an `ImageList`, or the rows of a data set."""

    @property
    def name(self) -> str: ...

    @property
    def labels(self) -> Numbers: ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes by their number; empty where they are not known."""

    def __len__(self) -> int: ...

    def describe(self, index: int) -> str:
        """Return the place and the name of an image."""


@final
class ImageListSource:
    """Serve listed images to a `Loader`; `image_list_source` and `image_folder_source` make one from paths.

    `on_bad_sample="skip"`: an image that cannot be read is replaced by the next one that can, with that one's own label and
    random numbers, and a sentence names it. The loader bounds their share.
    """

    reads_files: ClassVar[bool] = True
    plans_batches: bool = False

    def __init__(
        self,
        entries: Entries,
        files: ImageFiles,
        *,
        train: bool,
        image_size: int = 224,
        seed: int = 0,
        flip: bool = True,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        on_bad_sample: OnBadSample = "raise",
        channels_last: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.entries, self.files = entries, files
        self.train: bool = boolean().check("train", train)
        self.image_size: int = integer(1).check("image_size", image_size)
        self.seed: int = integer(0).check("seed", seed)
        self.flip: bool = boolean().check("flip", flip)
        self.mean: tuple[float, ...] = _rgb(number()).check("mean", mean)
        self.std: tuple[float, ...] = _rgb(number(above=0.0)).check("std", std)
        self.on_bad_sample: str = choice("raise", "skip").check("on_bad_sample", on_bad_sample)
        self.channels_last: bool = boolean().check("channels_last", channels_last)
        self.max_pixels: int = integer(1).check("max_pixels", max_pixels)
        self._positions = np.arange(1 + (2 if image_size < SMALL_BELOW else CROP_DRAWS))
        self._normalise = Normaliser(self.mean, self.std, channels_last=self.channels_last)

    def __len__(self) -> int:
        return len(self.entries)

    def batch(self, epoch: int, indices: Indices) -> tuple[Batch, list[str]]:
        """Return images [N, 3, size, size] in channels_last order, labels, and a sentence for each image replaced."""
        shape = (len(indices), self.image_size, self.image_size, 3)
        labels = self.entries.labels[indices]
        sent = empty_to_send(shape, torch.uint8, room=labels.nbytes + ROOM)
        images = sent.numpy()
        replaced: list[str] = []
        for row, (index, draws) in enumerate(zip(indices.tolist(), self._draws(epoch, indices), strict=True)):
            try:
                self._show(index, draws, images[row])
            except DataError as error:
                if self.on_bad_sample == "raise":
                    raise
                replaced.append(str(error))
                labels[row] = self._replace(epoch, index, images[row])
        return (sent.permute(0, 3, 1, 2), torch.from_numpy(labels)), replaced

    def finish(self, batch: Batch) -> Batch:
        """Normalise the images to float32, on the device where the bytes are."""
        images, labels = batch
        return self._normalise(images), labels

    def _draws(self, epoch: int, indices: Indices) -> list[list[float]]:
        if not self.train:
            return [[]] * len(indices)
        drawn: list[list[float]] = uniforms(self.seed, epoch, indices[:, None], self._positions).tolist()
        return drawn

    def _show(self, index: int, draws: list[float], out: Pixels) -> None:
        try:
            image = open_image(self.files.read(index), max_pixels=self.max_pixels)
            if self.train:
                training_view(image, self.image_size, draws[1:], out, mirrored=self.flip and draws[0] < 0.5)
            else:
                evaluation_view(image, self.image_size, out)
        except DataError as error:
            raise DataError(f"{self.entries.describe(index)}: {error}.") from None

    def _replace(self, epoch: int, index: int, out: Pixels) -> int:
        """Put the next readable image into `out`; return its label."""
        for step in range(1, min(MOST_REPLACEMENTS, len(self) - 1) + 1):
            other = (index + step) % len(self)
            try:
                self._show(other, self._draws(epoch, np.array([other]))[0], out)
            except DataError as error:
                last = error
            else:
                return int(self.entries.labels[other])
        if len(self) == 1:
            raise DataError(f"{self.entries.name}: its only image cannot be read, and there is no other to take its place.")
        raise DataError(f"{last} This and all images before it, from {self.entries.describe(index)} on, cannot be read.")


def _rgb(element: Kind) -> Kind:
    def parse(value: Any) -> tuple[float, ...]:
        require(isinstance(value, list | tuple) and len(value) == 3)
        return tuple(element.parse(part) for part in value)

    return Kind(f"three numbers for red, green and blue on a scale of 0 to 1, each {element.allowed}", parse)
