"""What one rank sends in an update of the MLP of bench/compression_speed.py, by ranks: why DGC stops paying, and PowerSGD not.

An all-reduce in a ring sends 2(N-1)/N of the data, which is near 2 for any N. An all-gather sends N-1 times what one rank has
chosen, since no two ranks choose the same entries and nothing can be added up on the way.
"""

from __future__ import annotations

from mlp_contestants import USUAL, Size

NUMBER_BYTES, ENTRY_BYTES = 4, 8
"""A sparse entry is a number and its place."""


def all_reduced(numbers: float, ranks: int, item_bytes: int = NUMBER_BYTES) -> float:
    return 2 * (ranks - 1) / ranks * numbers * item_bytes


def dense_bytes(ranks: int, item_bytes: int = NUMBER_BYTES, size: Size = USUAL) -> float:
    return all_reduced(size.weights + size.biases, ranks, item_bytes)


def dgc_bytes(ranks: int, sparsity: float = 0.999, size: Size = USUAL) -> float:
    """Biases are too small to be worth it, and travel dense."""
    entries = size.layers * int(size.width**2 * (1 - sparsity) + 1e-6)
    return (ranks - 1) * entries * ENTRY_BYTES + all_reduced(size.biases, ranks)


def powersgd_bytes(ranks: int, rank: int = 4, size: Size = USUAL) -> float:
    return all_reduced(size.layers * rank * 2 * size.width + size.biases, ranks)
