"""Average a model's weights as a few flat pieces, each sent by one collective.

Averaging is memory traffic: on a CPU the work goes stretch by stretch, so that every operation finds its stretch in the cache.
Where the optimizer trains a float32 copy of a 16-bit parameter (`master` in its state), the copy is averaged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from ..dist.comm import Comm, Pending
from ..engine.bucket import in_memory_order, view_like, wide_type
from ..engine.layout import bucket_runs
from .outer import OuterRule, outer_move

PIECES_WANTED = 6
SMALLEST_PIECE_BYTES, LARGEST_PIECE_BYTES = 4 * 2**20, 32 * 2**20
"""While one piece is sent the next is prepared and the one before is settled, so training waits for the link, the first piece's
start and the last one's end. Smaller pieces would cost latency."""
STRETCH = 2**17
"""Elements processed at a time: a few arrays of this length fit in a core's cache."""
Master: TypeAlias = Callable[[Tensor], Tensor | None]
"""Returns the float32 copy of a parameter that its optimizer keeps; None if it keeps none."""


@final
class Piece:
    """Average some parameters of one type, as flat tensors."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], rule: OuterRule, wire_dtype: torch.dtype) -> None:
        self.names = [name for name, _ in named]
        self.params: list[Tensor] = [param for _, param in named]
        self._rule = rule
        first = self.params[0]
        numel = sum(p.numel() for p in self.params)
        wide = wide_type(first.dtype)
        self.anchor = torch.zeros(numel, dtype=wide, device=first.device)
        """The last average of all ranks."""
        self.velocity = torch.zeros_like(self.anchor) if rule.momentum else None
        # float32, the default, stands for the type in which averages are kept: float64 weights are sent in float64.
        narrow = wire_dtype if wire_dtype != torch.float32 else wide
        self.wire = torch.zeros(numel, dtype=narrow, device=first.device)
        """This rank's delta while it is sent, the mean delta once it has arrived."""
        self.trains_on = False
        """Whether this rank's weights go on changing while its delta is under way."""
        self.sent: Tensor | None = None
        self.sent_share = 1.0
        """The share by which this rank's delta in `sent` was multiplied; `sent` is None where nothing was kept."""
        self._is_dense = all(torch.ops.aten.is_non_overlapping_and_dense(param) for param in self.params)

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.params])
        return [view_like(part, param) for part, param in zip(parts, self.params, strict=True)]

    def by_name(self, flat: Tensor | None) -> dict[str, Tensor]:
        return {} if flat is None else dict(zip(self.names, self.views(flat), strict=True))

    def put(self, flat: Tensor, named: Mapping[str, Tensor]) -> None:
        torch._foreach_copy_(self.views(flat), [named[name].to(flat.device) for name in self.names])

    def read(self, flat: Tensor, master: Master) -> None:
        """Copy the weights into a flat tensor."""
        torch._foreach_copy_(self.views(flat), [weight for weight, _ in self._weights(master)])

    def _weights(self, master: Master) -> list[tuple[Tensor, Tensor]]:
        """Pair what is trained (the master copy, else the parameter itself) with its parameter."""
        return [(copy if (copy := master(param)) is not None else param.detach(), param) for param in self.params]

    def _stretches(self, master: Master, *, changes: bool) -> Iterator[tuple[Tensor, slice]]:
        """Iterate over the weights as rows of memory, with their slices of the flat tensors; `changes`: writes are kept."""
        if self.anchor.device.type != "cpu" or not self._is_dense:
            staged = torch.empty_like(self.anchor)  # on a GPU a few large kernels are faster than many small ones
            self.read(staged, master)
            yield staged, slice(None)
            if changes:
                torch._foreach_copy_([weight for weight, _ in self._weights(master)], self.views(staged))
        else:
            start = 0
            for weight, _ in self._weights(master):
                row = in_memory_order(weight)
                for begin in range(0, len(row), STRETCH):
                    end = min(begin + STRETCH, len(row))
                    yield row[begin:end], slice(start + begin, start + end)
                start += len(row)
        if changes:
            for weight, param in self._weights(master):
                if weight.dtype != param.dtype:
                    param.copy_(weight)

    # --- one round ----------------------------------------------------------------------------------------------

    def launch(self, share: float, comm: Comm, master: Master, *, trains_on: bool) -> Pending:
        """Send this rank's delta. The weights may go on changing at once."""
        for weights, at in self._stretches(master, changes=False):
            delta, _ = scratch(len(weights), self.anchor)
            torch.sub(weights, self.anchor[at], out=delta)
            self.wire[at].copy_(delta.mul_(share))  # before the cast: a sum of 16-bit numbers must not overflow
        if trains_on:
            self._keep_sent(share, master)
        self.trains_on = trains_on
        return comm.all_reduce(self.wire)

    def _keep_sent(self, share: float, master: Master) -> None:
        if self.sent is None:
            self.sent = torch.empty_like(self.wire)
        self.sent_share = share or 1.0
        if share:
            self.sent.copy_(self.wire)
            return
        for weights, at in self._stretches(master, changes=False):  # no share in the mean: its own delta is dropped too
            self.sent[at].copy_(weights - self.anchor[at])

    def settle(self, master: Master) -> None:
        """Take the outer step with the mean delta, and bring the weights to the new anchor."""
        velocity = self.velocity
        for weights, at in self._stretches(master, changes=True):
            mean, own = scratch(len(weights), self.anchor)
            move = outer_move(mean.copy_(self.wire[at]), None if velocity is None else velocity[at], self._rule)
            self.anchor[at].add_(move)
            if self.trains_on and self.sent is not None:
                # What this rank has trained since, and what the cast to the wire lost, stays on top of the average.
                weights.add_(move.sub_(own.copy_(self.sent[at]), alpha=1 / self.sent_share))
            else:
                weights.copy_(self.anchor[at])
        self.trains_on = False

    def settle_inside(self, master: Master) -> None:
        """Set the weights to the mean of this node's ranks; the anchor, which is common to all ranks, stays."""
        for weights, at in self._stretches(master, changes=True):
            mean, _ = scratch(len(weights), self.anchor)
            weights.copy_(mean.copy_(self.wire[at]).add_(self.anchor[at]))


def scratch(numel: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return two rows to compute in: on a CPU always the same ones, which stay in the cache."""
    if like.device.type != "cpu" or numel > STRETCH:
        return like.new_empty(numel), like.new_empty(numel)
    rows = _rows(like.dtype)
    return rows[0, :numel], rows[1, :numel]


@functools.cache
def _rows(dtype: torch.dtype) -> Tensor:
    return torch.empty(2, STRETCH, dtype=dtype)


def pieces_of(params: Mapping[str, nn.Parameter], rule: OuterRule, wire_dtype: torch.dtype) -> list[Piece]:
    """Split a model into about `PIECES_WANTED` pieces, within the limits of size."""
    total = sum(param.nbytes for param in params.values())
    piece_bytes = min(max(total // PIECES_WANTED, SMALLEST_PIECE_BYTES), LARGEST_PIECE_BYTES)
    return [Piece(run, rule, wire_dtype) for run in bucket_runs(list(params.items()), bucket_bytes=piece_bytes)]
