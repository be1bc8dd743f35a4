"""Communication cost of each way to reduce gradients, in bytes and seconds: pure functions of sizes, ranks and the link.

Bytes are what one rank sends, as `report.bytes_sent` counts them. A ring all-reduce of S bytes sends 2(N-1)/N * S, at most 2 S;
an all-gather sends (N-1) * S, which grows with N, so that a sparse all-gather loses its advantage at some number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FLOAT32_BYTES = 4
ENTRY_BYTES = 8
"""Bytes of one sparse entry: a float32 value and its index."""

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
    """The network between any two ranks: bandwidth in bytes per second, latency in seconds."""

    ranks: int
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    bytes_sent: float
    """Bytes that one rank sends in one update."""
    seconds: float


# --- collectives --------------------------------------------------------------------------------------------------------


def all_reduce(payload_bytes: float, link: Link) -> Cost:
    """Return the cost of a ring all-reduce: N-1 steps to sum and N-1 steps to distribute the sums."""
    sent = 2 * (link.ranks - 1) / link.ranks * payload_bytes
    return Cost(sent, 2 * (link.ranks - 1) * link.latency_s + sent / link.bytes_per_s)


def all_gather(payload_bytes: float, link: Link) -> Cost:
    """Return the cost of a ring all-gather in N-1 steps."""
    sent = (link.ranks - 1) * payload_bytes
    return Cost(sent, (link.ranks - 1) * link.latency_s + sent / link.bytes_per_s)


def both(first: Cost, second: Cost) -> Cost:
    """Add the costs of two collectives that run one after the other."""
    return Cost(first.bytes_sent + second.bytes_sent, first.seconds + second.seconds)


# --- reducers -----------------------------------------------------------------------------------------------------------


def dense(numel: float, link: Link, *, item_bytes: float = FLOAT32_BYTES) -> Cost:
    """Return the cost of all-reducing every gradient; `item_bytes` is 2 for fp16_allreduce and bf16_allreduce."""
    return all_reduce(numel * item_bytes, link)


def sparse(numel: float, link: Link, *, sparsity: float, dense_numel: float = 0.0) -> Cost:
    """Return the cost of DGC: a share of `numel` entries is all-gathered, `dense_numel` other entries are all-reduced."""
    return both(all_reduce(dense_numel * FLOAT32_BYTES, link), all_gather((1 - sparsity) * numel * ENTRY_BYTES, link))


def low_rank(matrices: Sequence[tuple[int, int]], link: Link, *, rank: int, dense_numel: float = 0.0) -> Cost:
    """Return the cost of PowerSGD: left factors and dense gradients in one all-reduce, right factors in a second one."""
    left = sum(min(rank, rows, columns) * rows for rows, columns in matrices)
    right = sum(min(rank, rows, columns) * columns for rows, columns in matrices)
    return both(all_reduce((left + dense_numel) * FLOAT32_BYTES, link), all_reduce(right * FLOAT32_BYTES, link))


def quantised(numel: float, link: Link, *, bits: int, block: int, dense_numel: float = 0.0) -> Cost:
    """Return the cost of sending all numbers as integers, with a scale of 16 bits a block, to their owners and back.

    It is that of an all-reduce of these bytes, filled up to whole blocks of each rank. `dense_numel` of the numbers are zeros
    there, and all-reduced as they are."""
    whole = math.ceil(numel / (block * link.ranks)) * block * link.ranks
    return both(all_reduce(whole * (bits + 16 / block) / 8, link), all_reduce(dense_numel * FLOAT32_BYTES, link))


def averaging(numel: float, link: Link, *, period: int, item_bytes: float = FLOAT32_BYTES) -> Cost:
    """Return the mean cost per update of Local SGD: one dense all-reduce in `period` updates."""
    round_ = all_reduce(numel * item_bytes, link)
    return Cost(round_.bytes_sent / period, round_.seconds / period)


# --- break-even points --------------------------------------------------------------------------------------------------


def break_even_ranks(sparsity: float, *, item_bytes: float = FLOAT32_BYTES) -> float:
    """Return the number of ranks at which a sparse all-gather sends as much as a dense all-reduce.

    Solves (N-1) d S 8 = 2 (N-1)/N S item_bytes for N, with density d and S items; in float32 N = 1 / d."""
    return 2 * item_bytes / ((1 - sparsity) * ENTRY_BYTES)


def times_less(sparsity: float, ranks: int, *, item_bytes: float = FLOAT32_BYTES) -> float:
    """Return how many times fewer bytes a sparse all-gather sends than a dense all-reduce; below 1 it sends more."""
    return break_even_ranks(sparsity, item_bytes=item_bytes) / ranks


def low_rank_times_less(rows: int, columns: int, rank: int) -> float:
    """Return how many times fewer bytes two factors hold than their matrix; it does not depend on the number of ranks."""
    return rows * columns / ((rows + columns) * min(rank, rows, columns))
