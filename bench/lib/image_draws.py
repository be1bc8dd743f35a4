"""Random crops and flips of small images that lie on the device as bytes.

    draw(...)                  which image, which crop, which flip, for every sample of the run; from one seed, on the CPU
    crop_and_flip(...)         one gather: the padding is computed, never stored
    normalise(...), cut_out(...)

The draws depend on the seed and the number of images alone: runs that differ in optimizer or batch see the same samples in
the same order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

PADDING = 4
# Means and standard deviations of CIFAR-10's training images, channel by channel, in units of 255.
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)


def mirrored(position: Tensor, size: int) -> Tensor:
    """Positions outside 0..size-1 reflected at the first and the last pixel, which are not repeated."""
    last = size - 1
    return last - (last - position.abs()).abs()


def crop_and_flip(images: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """[B, H, W, 3] bytes: image `index` padded by reflection, cut `top` and `left` pixels into the padding, then mirrored."""
    height, width = images.shape[1:3]
    down = torch.arange(height, device=images.device)
    across = torch.arange(width, device=images.device)
    columns = torch.where(flip[:, None], width - 1 - across, across)
    rows = mirrored(down + (top[:, None] - PADDING), height)
    columns = mirrored(columns + (left[:, None] - PADDING), width)
    return images[index[:, None, None], rows[:, :, None], columns[:, None, :]]


def normalise(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes [B, H, W, 3] as floats [B, 3, H, W] of mean 0 and deviation 1, in channels_last without a copy."""
    mean, scale = _shift_and_scale(images.device)
    return ((images.float() - mean) * scale).to(dtype).permute(0, 3, 1, 2)


@functools.cache
def _shift_and_scale(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept, since a copy to the device in every micro-batch would wait for it."""
    return torch.tensor(MEAN, device=device) * 255, 1 / (torch.tensor(DEVIATION, device=device) * 255)


def cut_out(images: Tensor, top: Tensor, left: Tensor, hole: int) -> Tensor:
    """A square of `hole` pixels set to 0, the mean, in each of the images [B, 3, H, W]."""
    down = torch.arange(images.shape[2], device=images.device)
    across = torch.arange(images.shape[3], device=images.device)
    rows = (down >= top[:, None]) & (down < top[:, None] + hole)
    columns = (across >= left[:, None]) & (across < left[:, None] + hole)
    return images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


@dataclass(frozen=True)
class Draws:
    """One entry for every sample of a run, in the order in which they are used."""

    index: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor
    hole_top: Tensor
    hole_left: Tensor

    def to(self, device: torch.device) -> Draws:
        return Draws(*(getattr(self, part.name).to(device) for part in fields(self)))

    def slice(self, start: int, stop: int) -> Draws:
        return Draws(*(getattr(self, part.name)[start:stop] for part in fields(self)))


def draw(images: int, epochs: int, *, size: int, hole: int, seed: int, alternate_flip: bool = False) -> Draws:
    """A permutation of the images for each epoch, one after the other, so that a batch may reach over the border of two.

    With `alternate_flip` chance decides in the first epoch alone which images are mirrored, and from then on each is in every
    other epoch. All other draws are the same.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = images * epochs

    def below(end: int) -> Tensor:
        return torch.randint(end, (samples,), generator=generator, dtype=torch.int16)

    draws = Draws(
        torch.cat([torch.randperm(images, generator=generator) for _ in range(epochs)]),
        below(2 * PADDING + 1),
        below(2 * PADDING + 1),
        below(2).bool(),
        below(size - hole + 1),
        below(size - hole + 1),
    )
    return replace(draws, flip=alternating(draws.flip[:images], draws.index)) if alternate_flip else draws


def alternating(first: Tensor, index: Tensor) -> Tensor:
    """Whether each sample is mirrored, if image i is in the first epoch where `first[i]`, and then in every other one."""
    epoch = torch.arange(len(index)) // len(first)
    return first[index] ^ (epoch % 2 == 1)


def micro_batch(images: Tensor, labels: Tensor, draws: Draws, *, hole: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The augmented images and the labels of these draws."""
    pixels = normalise(crop_and_flip(images, draws.index, draws.top, draws.left, draws.flip), dtype)
    if hole:
        pixels = cut_out(pixels, draws.hole_top, draws.hole_left, hole)
    return pixels, labels[draws.index]
