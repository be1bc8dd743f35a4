"""Run DGC's arithmetic as operations on whole rows: any device, any type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ..engine.bucket import Bucket
from .compressor import Piece
from .top_k import STRETCH, largest


@dataclass(frozen=True, slots=True)
class Rule:
    """The settings of an optimizer group at this update; `decay` is one rank's share of it."""

    momentum: float
    nesterov: bool
    decay: float


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One tensor's gradient, with the momentum and the residual that this rank keeps for it."""

    piece: Piece
    u: Tensor
    """Momentum."""
    v: Tensor
    """Sum of what has not been sent."""


def accumulate(grad: Tensor, u: Tensor, v: Tensor, weights: Tensor | None, rule: Rule) -> None:
    """Update `u` and `v` by this gradient, in place. Rows of equal length; `weights` is None where there is no decay."""
    if grad.dtype != u.dtype or weights is not None:
        grad = grad.to(u.dtype, copy=True)
        if weights is not None:
            grad.add_(weights.to(u.dtype), alpha=rule.decay)
    torch.add(grad, u, alpha=rule.momentum, out=u)
    if rule.nesterov:
        v.add_(grad).add_(u, alpha=rule.momentum)
    else:
        v.add_(u)


def take_largest(u: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return places and values of the `count` largest entries of `v`, and zero them in `u` and `v`."""
    places = largest(v, count)
    values = v[places]
    v[places] = 0.0
    u[places] = 0.0
    return places, values


@final
class ListedRows:
    """Compress all rows of one type."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)

    def compress(self, rules: Sequence[Rule], counts: Sequence[int]) -> Tensor:
        """Return what this rank sends, as 32-bit words: first all values, then their places in their buckets."""
        chosen = []
        for row, rule, count in zip(self._rows, rules, counts, strict=True):
            self._accumulate(row, rule)
            places, values = take_largest(row.u, row.v, count)
            chosen.append((places + row.piece.offset, values))
        values = torch.cat([values for _, values in chosen])
        return torch.cat([values.view(torch.int32), torch.cat([places for places, _ in chosen]).int()])

    def _accumulate(self, row: Row, rule: Rule) -> None:
        grad, weights = row.piece.grad, row.piece.weights() if rule.decay else None
        # On a CPU in stretches, so that each operation finds the stretch in the cache.
        stretch = STRETCH if grad.device.type == "cpu" else max(len(grad), 1)
        for start in range(0, len(grad), stretch):
            at = slice(start, start + stretch)
            accumulate(grad[at], row.u[at], row.v[at], None if weights is None else weights[at], rule)
            grad[at].zero_()  # received entries are added here; zeroed now, while it is in the cache

    def spread(self, wires: Tensor, counts: Sequence[int]) -> None:
        """Add every rank's entries into the gradients, in the order of ranks, so that all ranks get the same bits."""
        wide = self._rows[0].v.dtype
        words = sum(counts) * (wide.itemsize // 4)
        sent = [(wire[:words].clone().view(wide), wire[words:].long()) for wire in wires]  # cloned: float64 must be aligned
        for bucket, part in self._parts(counts):
            out = bucket.flat if bucket.flat.dtype == wide else bucket.flat.to(wide)
            for values, places in sent:
                out.index_add_(0, places[part], values[part])
            if out is not bucket.flat:
                bucket.flat.copy_(out)

    def _parts(self, counts: Sequence[int]) -> list[tuple[Bucket, slice]]:
        """Split the entries by bucket; rows are in the order of buckets."""
        parts: list[tuple[Bucket, slice]] = []
        end = 0
        for row, count in zip(self._rows, counts, strict=True):
            begin, end = end, end + count
            if parts and parts[-1][0] is row.piece.bucket:
                parts[-1] = (row.piece.bucket, slice(parts[-1][1].start, end))
            else:
                parts.append((row.piece.bucket, slice(begin, end)))
        return parts
