"""Predict what each way of reducing gradients sends, and how long that takes: pure functions of sizes, ranks and the link.

Bytes are what one rank sends, as `report.bytes_sent` counts them. A ring all-reduce of S bytes sends 2(N-1)/N * S whatever N is;
an all-gather sends (N-1) * S: what is gathered grows with the ranks, and stops paying when there are enough of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FLOAT32_BYTES = 4
ENTRY_BYTES = 8
"""Bytes of a sparse entry: a float32 and its place."""

Shape = Sequence[int]
"""Lengths of a tensor's dimensions, the one that is outermost in memory first."""


def numel(shapes: Sequence[Shape]) -> int:
    """Count the numbers of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def as_matrix(shape: Shape) -> tuple[int, int]:
    """Rows and columns of a tensor: its outermost dimension against all others; a vector is one row."""
    count = math.prod(shape)
    return (shape[0], count // shape[0]) if len(shape) > 1 and count else (1, count)


@dataclass(frozen=True, slots=True)
class Link:
    """Describe the connection between any two ranks."""

    ranks: int
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    bytes_sent: float
    """Bytes that one rank sends."""
    seconds: float


# --- collectives ------------------------------------------------------------------------------------------------------------


def all_reduce(payload_bytes: float, link: Link) -> Cost:
    """Predict an all-reduce in a ring: one round to sum, one to hand the sums on."""
    sent = 2 * (link.ranks - 1) / link.ranks * payload_bytes
    return Cost(sent, 2 * (link.ranks - 1) * link.latency_s + sent / link.bytes_per_s)


def all_gather(payload_bytes: float, link: Link) -> Cost:
    sent = (link.ranks - 1) * payload_bytes
    return Cost(sent, (link.ranks - 1) * link.latency_s + sent / link.bytes_per_s)


def both(first: Cost, second: Cost) -> Cost:
    """Add the costs of two messages, one after the other."""
    return Cost(first.bytes_sent + second.bytes_sent, first.seconds + second.seconds)


# --- reducers ---------------------------------------------------------------------------------------------------------------


def dense(numel: float, link: Link, *, item_bytes: float = FLOAT32_BYTES) -> Cost:
    """Predict an all-reduce of every gradient; with 2 bytes an item, fp16_allreduce and bf16_allreduce."""
    return all_reduce(numel * item_bytes, link)


def sparse(numel: float, link: Link, *, sparsity: float, dense_numel: float = 0.0) -> Cost:
    """Predict DGC: a share of the entries of `numel` is gathered, `dense_numel` others are reduced."""
    return both(all_reduce(dense_numel * FLOAT32_BYTES, link), all_gather((1 - sparsity) * numel * ENTRY_BYTES, link))


def low_rank(matrices: Sequence[tuple[int, int]], link: Link, *, rank: int, dense_numel: float = 0.0) -> Cost:
    """Predict PowerSGD: two factors of each matrix, all left ones in one collective, with what is dense, all right ones in another."""
    left = sum(min(rank, rows, columns) * rows for rows, columns in matrices)
    right = sum(min(rank, rows, columns) * columns for rows, columns in matrices)
    return both(all_reduce((left + dense_numel) * FLOAT32_BYTES, link), all_reduce(right * FLOAT32_BYTES, link))


def averaging(numel: float, link: Link, *, period: int, item_bytes: float = FLOAT32_BYTES) -> Cost:
    """Predict Local SGD: one dense all-reduce in `period` updates; the mean of one update."""
    round_ = all_reduce(numel * item_bytes, link)
    return Cost(round_.bytes_sent / period, round_.seconds / period)


# --- where one stops paying -------------------------------------------------------------------------------------------------


def break_even_ranks(sparsity: float, *, item_bytes: float = FLOAT32_BYTES) -> float:
    """Solve for the ranks with which a sparse all-gather sends as much as a dense all-reduce: (N-1) d S 8 = 2 (N-1)/N S item_bytes.

    In float32 that is 1 / density."""
    return 2 * item_bytes / ((1 - sparsity) * ENTRY_BYTES)


def times_less(sparsity: float, ranks: int, *, item_bytes: float = FLOAT32_BYTES) -> float:
    """Return how many times fewer bytes a sparse all-gather sends than a dense all-reduce; below 1: it sends more."""
    return break_even_ranks(sparsity, item_bytes=item_bytes) / ranks


def low_rank_times_less(rows: int, columns: int, rank: int) -> float:
    """Return how many times fewer bytes two factors are than their matrix; the same for any number of ranks."""
    return rows * columns / ((rows + columns) * min(rank, rows, columns))
