"""Patch whitening: a first layer computed from the training images, and never learnt.

    covariance of all patches of size x size pixels = V diag(values) V'
    filter i = V[:, i] / sqrt(values[i] + EPSILON)          and the same with the other sign, since an activation follows

What comes out has variance 1 and no correlation, so that what follows need not learn first what neighbouring pixels share.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.lib.image_draws import normalise

EPSILON = 1e-2  # of pixels with variance 1: finer differences are mostly the noise of JPEG, which must not be blown up to 1
FITTED_IMAGES, PART = 1000, 250  # a million patches


def patch_covariance(images: Tensor, size: int) -> Tensor:
    """In float64 on the CPU, over every patch of the bytes [N, H, W, 3] as a network sees them."""
    dimensions = 3 * size * size
    count, sums = 0, torch.zeros(dimensions, dtype=torch.float64)
    squares = torch.zeros(dimensions, dimensions, dtype=torch.float64)
    for part in images.split(PART):
        patches = F.unfold(normalise(part).contiguous(), size).transpose(0, 1).flatten(1).double()
        count += patches.shape[1]
        sums += patches.sum(1).cpu()
        squares += (patches @ patches.T).cpu()
    mean = sums / count
    return squares / count - mean.outer(mean)


def whitening_filters(covariance: Tensor, size: int, epsilon: float = EPSILON) -> Tensor:
    """[2 * 3 * size * size, 3, size, size]: every filter, the one of the largest variance first, then their negatives."""
    values, vectors = torch.linalg.eigh(covariance)
    scaled = (vectors / (values.clamp(min=0) + epsilon).sqrt()).T.flip(0)
    filters = scaled.reshape(-1, 3, size, size)
    return torch.cat([filters, -filters])


def evenly_spaced(images: Tensor, most: int = FITTED_IMAGES) -> Tensor:
    """At most so many, from the whole list: it may be sorted by class."""
    return images[:: -(-len(images) // most)]


class Whitening(nn.Module):
    """A convolution that keeps height and width. Its filters are a buffer, no parameter; zero until `fit`."""

    filters: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.outputs = size, 2 * 3 * size * size
        self.register_buffer("filters", torch.zeros(self.outputs, 3, size, size))

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """To bytes [N, H, W, 3], in the place where the filters lie: a captured graph reads them there."""
        self.filters.copy_(whitening_filters(patch_covariance(evenly_spaced(images), self.size), self.size))

    def forward(self, images: Tensor) -> Tensor:
        before = (self.size - 1) // 2
        after = self.size - 1 - before
        return F.conv2d(F.pad(images, (before, after, before, after)), self.filters)
