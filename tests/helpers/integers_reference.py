"""Blockwise integers as they are defined, in NumPy: what fleetx.dist.codec is compared with. Shares no line with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def to_bfloat16(values: Array) -> Array:
    """Round finite values to the nearest bfloat16, ties to even, by way of float32; the results are float64."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def blockwise(row: Array, *, bits: int, block: int) -> tuple[Array, Array]:
    """Return what is received in the place of a row of finite numbers, and what is kept: their sum is the row."""
    received = np.zeros_like(row)
    for begin in range(0, len(row), block):
        values = row[begin : begin + block]
        largest = 2 ** (bits - 1) - 1
        scale = to_bfloat16(np.array([np.abs(values).max() / largest], dtype=row.dtype))[0].astype(row.dtype)
        if scale >= 2.0**-126:
            received[begin : begin + block] = np.rint(values / scale) * scale
    return received, row - received


class QuantisedRanks:
    """All ranks of a run of quantised all-reduce: `reduce` is what one update does to a row of each rank's gradients.

    A rank owns one part of the row, of whole blocks. It receives share + residual of the others, blockwise, adds them to its own
    in rank order, and sends the sum on in the same way. What was not sent is the next residual, of both hops."""

    def __init__(
        self,
        *,
        ranks: int,
        numel: int,
        bits: int,
        block: int,
        feeds_back: bool = True,
        part: int | None = None,
        both: bool = True,
    ) -> None:
        """Start without residuals. `part`: numbers that a rank owns, where others cut the row; `both`: the sums are sent on."""
        self.ranks, self.bits, self.block, self.feeds_back, self.both = ranks, bits, block, feeds_back, both
        self.part = -(-numel // (ranks * block)) * block if part is None else part
        self.residuals = [np.zeros(numel) for _ in range(ranks)]

    def reduce(self, shares: list[Array]) -> Array:
        found = np.zeros_like(shares[0])
        sums = [share + residual for share, residual in zip(shares, self.residuals, strict=True)]
        for owner in range(self.ranks):
            at = slice(owner * self.part, (owner + 1) * self.part)
            total = sums[owner][at].copy()
            for sender in range(self.ranks):
                if sender != owner:
                    received, sums[sender][at] = blockwise(sums[sender][at], bits=self.bits, block=self.block)
                    total += received
            sent_on = blockwise(total, bits=self.bits, block=self.block) if self.both else (total, np.zeros_like(total))
            found[at], sums[owner][at] = sent_on
        if self.feeds_back:
            self.residuals = sums
        return found
