"""Choose which part of an image is shown, by its size and uniform draws in [0, 1), and normalise bytes on the device.

A box is (left, top, right, bottom) in pixels of the image. Scaling it to the model's input is one resampling of that box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# --- Normalising: bytes to floats, on the device where the bytes are ---------------------------------------------------

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalisation(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return shift and factor of each channel: (bytes - shift) * factor is (bytes / 255 - mean) / std."""
    shift = torch.tensor([255 * value for value in mean], dtype=torch.float32)
    factor = torch.tensor([1 / (255 * value) for value in std], dtype=torch.float32)
    return shift.view(1, -1, 1, 1).to(device), factor.view(1, -1, 1, 1).to(device)


class Normaliser:
    """Turn uint8 images into normalised float32; one grey channel is repeated for every channel of `mean`."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, channels_last: bool) -> None:
        self.mean, self.std, self.channels_last = mean, std, channels_last
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        if images.device not in self._constants:  # cached: building them for each batch would copy them there each time
            self._constants[images.device] = normalisation(self.mean, self.std, images.device)
        shift, factor = self._constants[images.device]
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        coloured = images.expand(-1, len(self.mean), -1, -1)
        # Moved as bytes, a quarter of the traffic; widened before the arithmetic, which is slow on a CPU when it mixes types.
        return coloured.contiguous(memory_format=layout).float().sub_(shift).mul_(factor)


# --- Crops: which box of the image becomes the model's input -----------------------------------------------------------

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""An array [height, width, 3]."""
Box: TypeAlias = tuple[float, float, float, float]

CROP_TRIES = 10
CROP_DRAWS = 2 * CROP_TRIES + 2
"""Draws of one crop: area and shape of each try, then its position (two)."""


def resized_crop_box(
    width: int,
    height: int,
    draws: Sequence[float],
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Draw a box of random area (a share of the image's) and shape (log-uniform); the largest central one if no try fits."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for number in range(CROP_TRIES):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * draws[2 * number])
        shape = math.exp(low + (high - low) * draws[2 * number + 1])
        across, down = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < across <= width and 0 < down <= height:
            left = whole_below(width - across + 1, draws[-2])
            top = whole_below(height - down + 1, draws[-1])
            return left, top, left + across, top + down
    return central_box(width, height, ratio)


def central_box(width: int, height: int, ratio: tuple[float, float]) -> Box:
    """Return the largest central box whose width / height lies within `ratio`."""
    across = min(width, max(1, round(height * ratio[1])))
    down = min(height, max(1, round(width / ratio[0])))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def evaluation_box(width: int, height: int, image_size: int, margin: float = 256 / 224) -> Box:
    """Return the central square of the image scaled to a short side of `margin * image_size`, in the image's own pixels."""
    short = round(image_size * margin)
    long = int(short * max(width, height) / min(width, height))
    across, down = (short, long) if width <= height else (long, short)
    left, top = round((across - image_size) / 2), round((down - image_size) / 2)
    x, y = width / across, height / down
    return left * x, top * y, (left + image_size) * x, (top + image_size) * y


def padded_crop_offset(draw: float, pad: int) -> int:
    """Return where a crop of the image's own size begins in the padded image: -pad to pad."""
    return whole_below(2 * pad + 1, draw) - pad


def shift_into(out: Pixels, pixels: Pixels, across: int, down: int) -> None:
    """Fill `out` with the image shifted by `across` and `down` pixels; black outside the image."""
    height, width = pixels.shape[:2]
    out.fill(0)
    out[max(-down, 0) : height - max(down, 0), max(-across, 0) : width - max(across, 0)] = pixels[
        max(down, 0) : height + min(down, 0), max(across, 0) : width + min(across, 0)
    ]


def whole_below(limit: int, draw: float) -> int:
    """Map a draw to a whole number from 0 to limit - 1, each equally likely. The product may round up to the limit itself."""
    return min(int(limit * draw), limit - 1)
