"""Average a model's weights as a few flat pieces, each sent by one collective: dense ones here, others in compressed.py.

Averaging is memory traffic: on a CPU the work goes stretch by stretch, so that every operation finds its stretch in the cache.
Where the optimizer trains a float32 copy of a 16-bit parameter (`master` in its state), the copy is averaged.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

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


class FlatPiece(abc.ABC):
    """Some parameters of one type, read and written as flat tensors; a subclass says how their deltas travel."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], rule: OuterRule) -> None:
        self.names = [name for name, _ in named]
        self.params: list[Tensor] = [param for _, param in named]
        self._rule = rule
        first = self.params[0]
        numel = sum(p.numel() for p in self.params)
        self.anchor = torch.zeros(numel, dtype=wide_type(first.dtype), device=first.device)
        """The last average of all ranks."""
        self.velocity = torch.zeros_like(self.anchor) if rule.momentum else None
        self.kept: Tensor | None = None
        """What this rank has not sent yet, as part of the mean; None where everything is sent."""
        self.trains_on = False
        """Whether this rank's weights go on changing while its delta is under way."""
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

    def begin(self, master: Master) -> None:
        """Take the current weights, equal on all ranks, as the anchor; keep nothing else."""
        self.read(self.anchor, master)
        self.trains_on = False
        for row in (self.velocity, self.kept):
            if row is not None:
                row.zero_()

    # --- one round ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def launch(self, share: float, comm: Comm, master: Master, *, trains_on: bool) -> Pending:
        """Send this rank's delta to all ranks. The weights may go on changing at once."""

    @property
    def needs_relay(self) -> bool:
        """Whether what was sent needs a second exchange."""
        return False

    def relay(self, comm: Comm) -> Pending:
        """Start the second exchange, where the first, which has arrived, does not bring the mean to all ranks."""
        return Pending(None)

    @abc.abstractmethod
    def settle(self, master: Master) -> None:
        """Take the outer step with the mean delta, and bring the weights to the new anchor."""

    @abc.abstractmethod
    def launch_inside(self, share: float, comm: Comm, master: Master) -> Pending:
        """Send this rank's delta to the ranks of its node, dense."""

    @abc.abstractmethod
    def settle_inside(self, master: Master) -> None:
        """Set the weights to the mean of this node's ranks; the anchor, which is common to all ranks, stays."""

    def _write_share(self, row: Tensor, share: float, master: Master) -> None:
        for weights, at in self._stretches(master, changes=False):
            delta, _ = scratch(len(weights), self.anchor)
            torch.sub(weights, self.anchor[at], out=delta)
            row[at].copy_(delta.mul_(share))  # before the cast: a sum of 16-bit numbers must not overflow

    def _write_inside(self, row: Tensor, master: Master) -> None:
        for weights, at in self._stretches(master, changes=True):
            mean, _ = scratch(len(weights), self.anchor)
            weights.copy_(mean.copy_(row[at]).add_(self.anchor[at]))

    # --- a round under way, for checkpoints -----------------------------------------------------------------------

    @abc.abstractmethod
    def round_state(self) -> dict[str, Any]:
        """Return what has arrived and what this rank had sent, by name; only after the collectives of the round."""

    @abc.abstractmethod
    def load_round(self, state: Mapping[str, Any]) -> None:
        """Take that up."""

    def takes_bytes(self, shape: tuple[int, ...]) -> bool:
        """Return whether rows of bytes of this shape can be those that this piece waits for."""
        return False


@final
class Piece(FlatPiece):
    """Send deltas as floats, summed on the wire."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], rule: OuterRule, wire_dtype: torch.dtype) -> None:
        super().__init__(named, rule)
        # float32, the default, stands for the type in which averages are kept: float64 weights are sent in float64.
        narrow = wire_dtype if wire_dtype != torch.float32 else self.anchor.dtype
        self.wire = torch.zeros_like(self.anchor, dtype=narrow)
        """This rank's delta while it is sent, the mean delta once it has arrived."""
        self.sent: Tensor | None = None
        self.sent_share = 1.0
        """The share by which this rank's delta in `sent` was multiplied; `sent` is None where nothing was kept."""

    def launch(self, share: float, comm: Comm, master: Master, *, trains_on: bool) -> Pending:
        self._write_share(self.wire, share, master)
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

    def launch_inside(self, share: float, comm: Comm, master: Master) -> Pending:
        return self.launch(share, comm, master, trains_on=False)

    def settle_inside(self, master: Master) -> None:
        self._write_inside(self.wire, master)

    def round_state(self) -> dict[str, Any]:
        return {"mean": self.by_name(self.wire), "sent": self.by_name(self.sent), "share": self.sent_share}

    def load_round(self, state: Mapping[str, Any]) -> None:
        self.put(self.wire, state["mean"])
        if state["sent"]:
            self.sent, self.sent_share, self.trains_on = torch.empty_like(self.wire), float(state["share"]), True
            self.put(self.sent, state["sent"])


def scratch(numel: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return two rows to compute in: on a CPU always the same ones, which stay in the cache."""
    if like.device.type != "cpu" or numel > STRETCH:
        return like.new_empty(numel), like.new_empty(numel)
    rows = _rows(like.dtype)
    return rows[0, :numel], rows[1, :numel]


@functools.cache
def _rows(dtype: torch.dtype) -> Tensor:
    return torch.empty(2, STRETCH, dtype=dtype)


Run: TypeAlias = Sequence[tuple[str, nn.Parameter]]
"""Parameters of one type that follow each other, by name."""


def runs_of(params: Mapping[str, nn.Parameter]) -> Sequence[Run]:
    """Split a model into about `PIECES_WANTED` runs, within the limits of size."""
    total = sum(param.nbytes for param in params.values())
    piece_bytes = min(max(total // PIECES_WANTED, SMALLEST_PIECE_BYTES), LARGEST_PIECE_BYTES)
    return bucket_runs(list(params.items()), bucket_bytes=piece_bytes)


def pieces_of(params: Mapping[str, nn.Parameter], rule: OuterRule, wire_dtype: torch.dtype) -> list[Piece]:
    """Split a model into dense pieces."""
    return [Piece(run, rule, wire_dtype) for run in runs_of(params)]


def fragments_of(params: Mapping[str, nn.Parameter], fragments: int) -> list[dict[str, nn.Parameter]]:
    """Split a model into so many parts, whole tensors in their order, none of them empty and all of about one size."""
    sizes, parts, done = [param.nbytes for param in params.values()], [], 0
    names, left = list(params), sum(sizes)
    for part in range(fragments):
        others = fragments - part - 1  # each of which needs a tensor
        end, held = (done + 1, sizes[done]) if others else (len(names), left)
        # A tensor belongs to the part that its middle lies in.
        while end < len(names) - others and (held + sizes[end] / 2) * (others + 1) <= left:
            held += sizes[end]
            end += 1
        parts.append({name: params[name] for name in names[done:end]})
        done, left = end, left - held
    return parts
