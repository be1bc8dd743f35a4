"""Which elements of each parameter a rank owns: a contiguous range of every flat bucket, cut into the parameters it crosses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..engine.bucket import Bucket, in_memory_order


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `start` to `stop` of one parameter, in the order of its memory, which one rank owns."""

    place: int
    """Of the parameter among all, in the order of the buckets."""
    rank: int
    start: int
    stop: int
    offset: int
    """Where the first of them lies in the flat bucket."""


def ranges_of(numels: Sequence[int], *, share: int, ranks: int, first_place: int = 0) -> list[Range]:
    """Cut one bucket of tensors with so many elements into equal shares of the ranks, and those into ranges, in memory order."""
    found: list[Range] = []
    begin = 0
    for place, numel in enumerate(numels, first_place):
        for rank in range(begin // share, min(ranks, -(-(begin + numel) // share))):
            start, stop = max(begin, rank * share), min(begin + numel, (rank + 1) * share)
            if stop > start:
                found.append(Range(place, rank, start - begin, stop - begin, start))
        begin += numel
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A range that this rank owns, and what the optimizer trains in the parameter's place."""

    range: Range
    param: nn.Parameter
    share: nn.Parameter
    grad: Tensor
    """Where the mean of this range's gradient lies."""

    @property
    def place(self) -> int:
        return self.range.place

    def follow(self) -> None:
        """Point at the parameter's memory again, where `param.data = ...` has replaced it; show the gradient if there is one."""
        mine = in_memory_order(self.param.data)[self.range.start : self.range.stop]
        if mine.data_ptr() != self.share.data_ptr():
            self.share.data = mine
        self.share.grad = self.grad if self.param.grad is not None else None


def pieces_of(bucket: Bucket, ranges: Iterable[Range], *, first_place: int) -> list[Piece]:
    """Make what the optimizer trains of the ranges of a bucket that this rank owns."""
    pieces = []
    for one in ranges:
        param = bucket.params[one.place - first_place]
        share = nn.Parameter(in_memory_order(param.data)[one.start : one.stop])
        begin = one.offset - one.rank * bucket.share_numel if bucket.reduced is not bucket.flat else one.offset
        grad = bucket.reduced[begin : begin + one.stop - one.start]
        pieces.append(Piece(one, param, share, grad))
    return pieces
