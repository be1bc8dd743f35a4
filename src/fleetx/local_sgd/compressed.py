"""Average a piece of the weights as bytes: quantised or sparse deltas, whose rest is kept and sent later (error feedback).

    e    = error_decay * e + share * delta      of this rank; in units of the mean, so that all ranks' add up
    sent = codec(e)
    e    = e - sent                             exact in the codecs' arithmetic: sent + kept is the change, to the bit
    mean = sum of what all ranks have sent      every rank decodes the same bytes in rank order: equal bits
    the anchor takes the outer step with the mean, and the weights are the anchor (with overlap: what was trained since on top)

Two ways, by what a rank sends of S bytes:
    gathered   every rank's bytes go to all: (N - 1) * S. For sparse deltas, whose sum has more entries, and on 2 ranks
    owned      each rank owns 1/N of the piece. Bytes go to their owner, which sums them, encodes the sum and sends it to all:
               2 (N - 1) / N * S. What this second encoding misses becomes part of the owner's own e: nothing is lost

What is not finite is sent as it is, so that all ranks see it, and kept nowhere: one bad update leaves no trace in e.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ..dist.comm import Comm, Pending
from .outer import OuterRule, outer_move
from .pieces import FlatPiece, Master, scratch
from .wire import Wire, WireCodec

SEGMENT, SEGMENT_ON_GPU = 2**17, 2**22
"""Entries encoded at a time: on a CPU a few arrays of this length fit in a core's cache; a GPU wants few large kernels."""


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Where the bytes of a row of entries lie: one part for each owner, cut into segments that are encoded by themselves."""

    codec: WireCodec
    numel: int
    owners: int
    segment: int

    @property
    def part(self) -> int:
        """Entries of a part; the last may have fewer, or none."""
        return -(-self.numel // self.owners)

    @property
    def part_bytes(self) -> int:
        return sum(self.codec.nbytes(min(self.segment, self.part - at)) for at in range(0, self.part, self.segment))

    def segments(self, owner: int) -> Iterator[tuple[slice, slice]]:
        """Iterate over the segments of a part: their entries in the row, their bytes in the part."""
        begin, end, at = owner * self.part, min((owner + 1) * self.part, self.numel), 0
        for first in range(begin, end, self.segment):
            last = min(first + self.segment, end)
            size = self.codec.nbytes(last - first)
            yield slice(first, last), slice(at, at + size)
            at += size


@final
class CompressedPiece(FlatPiece):
    """Send deltas as bytes, and keep what these miss."""

    kept: Tensor

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], rule: OuterRule, wire: Wire, comm: Comm) -> None:
        super().__init__(named, rule)
        assert wire.codec is not None
        self._codec, self._decay = wire.codec, wire.error_decay
        self.kept = torch.zeros_like(self.anchor)
        self._is_owned, self._rank = comm.size > 2 and not wire.sums_grow, comm.rank
        segment = SEGMENT if self.anchor.device.type == "cpu" else SEGMENT_ON_GPU
        self._layout = Layout(wire.codec, len(self.anchor), comm.size if self._is_owned else 1, segment)
        self._bytes = torch.zeros(self._layout.owners, self._layout.part_bytes, dtype=torch.uint8, device=self.anchor.device)
        """What this rank sends, a row for each owner."""
        self._received: Tensor | None = None
        """What all ranks have sent to this one as an owner; None unless it is to be summed."""
        self._gathered: Tensor | None = None
        """What all ranks have sent, or all owners; None before that."""
        self._mean: Tensor | None = None
        """The mean of a round that was loaded; None: `_gathered` holds it."""
        self._sent: Tensor | None = None
        """This rank's delta when it was sent; None where it does not train on meanwhile."""
        self._inside: Tensor | None = None
        """The delta, then the mean, of a round inside a node; None outside of one."""

    @property
    def needs_relay(self) -> bool:
        return self._received is not None

    def begin(self, master: Master) -> None:
        super().begin(master)
        self._received = self._gathered = self._mean = self._sent = self._inside = None

    # --- one round ----------------------------------------------------------------------------------------------

    def launch(self, share: float, comm: Comm, master: Master, *, trains_on: bool) -> Pending:
        self._sent = torch.empty_like(self.anchor) if trains_on else None
        for weights, at in self._stretches(master, changes=False):
            delta, _ = scratch(len(weights), self.anchor)
            torch.sub(weights, self.anchor[at], out=delta)
            if self._sent is not None:
                self._sent[at].copy_(delta)
            if self._decay != 1.0:
                self.kept[at].mul_(self._decay)
            self.kept[at].add_(delta.mul_(share))
        self.trains_on = trains_on
        for owner in range(self._layout.owners):
            for entries, at in self._layout.segments(owner):
                self._encode(self.kept[entries], self._bytes[owner, at])
        if self._is_owned:
            self._received = torch.empty_like(self._bytes)
            pending = comm.all_to_all(self._bytes, self._received)
        else:
            self._gathered, pending = comm.all_gather(self._bytes[0])
        return pending

    def _encode(self, row: Tensor, wire: Tensor) -> None:
        """Write bytes of the row, and leave in it what they miss."""
        self._codec.encode(row, wire, kept=row)
        # On a GPU asking first would wait for the device.
        if row.device.type != "cpu" or not math.isfinite(float(row.sum())):
            row.masked_fill_(~row.isfinite(), 0.0)

    def relay(self, comm: Comm) -> Pending:
        if self._received is None:
            return Pending(None)
        own = self._bytes[0]  # what it held has been sent
        for entries, at in self._layout.segments(self._rank):
            total = self._sum(self._received[:, at], entries)
            self._encode(total, own[at])
            self.kept[entries].add_(total)
        self._received = None
        self._gathered, pending = comm.all_gather(own)
        return pending

    def _sum(self, rows: Tensor, entries: slice) -> Tensor:
        """Sum what each of these rows of bytes holds of a segment, in their order."""
        total, _ = scratch(entries.stop - entries.start, self.anchor)
        total.zero_()
        for row in rows:
            self._codec.add_decoded(row, total)
        return total

    def _means(self) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over the segments, with the mean delta of each."""
        for owner in range(self._layout.owners):
            for entries, at in self._layout.segments(owner):
                if self._mean is not None:
                    yield entries, self._mean[entries].clone()
                else:
                    assert self._gathered is not None
                    rows = self._gathered[owner : owner + 1] if self._is_owned else self._gathered
                    yield entries, self._sum(rows[:, at], entries)

    def settle(self, master: Master) -> None:
        sent = self._sent if self.trains_on else None
        for entries, mean in self._means():
            move = outer_move(mean, None if self.velocity is None else self.velocity[entries], self._rule)
            self.anchor[entries].add_(move)
            if sent is not None:
                sent[entries].sub_(move)
        for weights, at in self._stretches(master, changes=True):
            if sent is not None:
                weights.sub_(sent[at])  # what this rank has trained since stays on top of the average
            else:
                weights.copy_(self.anchor[at])
        self.trains_on = False
        self._gathered = self._mean = self._sent = None

    def launch_inside(self, share: float, comm: Comm, master: Master) -> Pending:
        self._inside = torch.empty_like(self.anchor)
        self._write_share(self._inside, share, master)
        return comm.all_reduce(self._inside)

    def settle_inside(self, master: Master) -> None:
        assert self._inside is not None
        self._write_inside(self._inside, master)
        self._inside = None

    # --- a round under way ----------------------------------------------------------------------------------------

    def round_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"mean": {}, "sent": self.by_name(self._sent if self.trains_on else None), "share": 1.0}
        if self._received is not None:
            return state | {"received": {self.names[0]: self._received}}
        mean = torch.empty_like(self.anchor)
        for entries, of_segment in self._means():
            mean[entries] = of_segment
        return state | {"mean": self.by_name(mean)}

    def takes_bytes(self, shape: tuple[int, ...]) -> bool:
        return self._is_owned and shape == tuple(self._bytes.shape)

    def load_round(self, state: Mapping[str, Any]) -> None:
        received = state.get("received", {}).get(self.names[0])
        if received is not None:
            self._received = received.to(self.anchor.device).clone()
        else:
            self._mean = torch.empty_like(self.anchor)
            self.put(self._mean, state["mean"])
        if state["sent"]:
            self._sent, self.trains_on = torch.empty_like(self.anchor), True
            self.put(self._sent, state["sent"])
            self._sent.div_(float(state["share"]))
