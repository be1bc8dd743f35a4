"""Orthogonalise matrices: the Newton-Schulz iteration of Muon, in batches of equal shapes, and how the work divides.

A *batch* is made by shapes alone, never by how many ranks there are: the bits of a product may depend on what it is computed
with, and so each batch is computed whole by one rank, and gives the bits that one rank alone would get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic by K. Jordan: it takes singular values between about 0.001 and 1 to between 0.7 and 1.2 in five steps."""
NORM_FLOOR = 1e-7
"""Least norm that a matrix is divided by, so that one of zeros stays zeros."""
BATCH_ELEMENTS = 2**23
BATCH_MATRICES = 8
"""Most elements and matrices of one batch: enough to fill a GPU, and few enough to divide between many ranks."""


def newton_schulz(
    matrices: Tensor, *, steps: int, coefficients: Sequence[float] = COEFFICIENTS, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return matrices, in `dtype`, with the singular vectors of these and singular values near 1: one matrix, or a batch."""
    a, b, c = coefficients
    found = matrices.to(dtype)
    is_tall = found.shape[-2] > found.shape[-1]
    if is_tall:  # the products below are of the shorter side
        found = found.mT
    found = found / torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True).clamp(min=NORM_FLOOR)
    multiply_add = torch.addmm if found.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        squared = found @ found.mT
        polynomial = multiply_add(squared, squared, squared, beta=b, alpha=c)
        found = multiply_add(found, polynomial, found, beta=a)
    return found.mT if is_tall else found


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor seen as a matrix: of a convolution, its output channels and the rest."""
    return shape[0], math.prod(shape[1:])


def as_matrix(tensor: Tensor) -> Tensor:
    """View a tensor as a matrix; a copy where its memory is in another order (channels_last)."""
    return tensor.reshape(matrix_shape(tensor.shape))


def orthogonalise(tensors: Sequence[Tensor], *, steps: int, coefficients: Sequence[float], dtype: torch.dtype) -> list[Tensor]:
    """Orthogonalise tensors, whose matrices or their transposes have equal shapes, by one product; in the order given."""
    matrices = [as_matrix(tensor) for tensor in tensors]
    if len(matrices) == 1:
        found = [newton_schulz(matrices[0], steps=steps, coefficients=coefficients, dtype=dtype)]
    else:
        wide = torch.stack([(m.mT if m.shape[0] > m.shape[1] else m).to(dtype) for m in matrices])
        rows = newton_schulz(wide, steps=steps, coefficients=coefficients, dtype=dtype).unbind()
        found = [row.mT if m.shape[0] > m.shape[1] else row for m, row in zip(matrices, rows, strict=True)]
    return [matrix.reshape(tensor.shape) for matrix, tensor in zip(found, tensors, strict=True)]


def batches_of(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Divide matrices, given by rows and columns, into batches of equal shapes (or transposed ones), in their order."""
    open_batches: dict[tuple[int, int], list[int]] = {}
    found: list[list[int]] = []
    for place, (rows, columns) in enumerate(shapes):
        key = min(rows, columns), max(rows, columns)
        most = max(1, min(BATCH_MATRICES, BATCH_ELEMENTS // (rows * columns)))
        if key not in open_batches or len(open_batches[key]) >= most:
            open_batches[key] = []
            found.append(open_batches[key])
        open_batches[key].append(place)
    return found


def cost(rows: int, columns: int) -> float:
    """Return the multiplications of one step of the iteration."""
    short, long = sorted((rows, columns))
    return short * short * (2.0 * long + short)


def shares_of(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Divide batches between ranks: the dearest first, each to the rank with the least so far. Every rank finds the same."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for batch in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        shares[rank].append(batch)
        loads[rank] += costs[batch]
    return shares
