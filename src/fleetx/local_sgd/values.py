"""Average a model's weights, its buffers and, with `average_state`, its optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..dist.comm import Comm, Pending
from ..engine.rank_status import Row
from ..engine.slots import Site
from ..errors import CheckpointError
from .buffers import Buffers
from .compressed import CompressedPiece
from .moments import MASTER, Moments
from .outer import OuterRule
from .pieces import FlatPiece, Piece, Run, fragments_of, runs_of
from .round import Round
from .wire import Wire

Own: TypeAlias = tuple[list[list[Tensor]], tuple[list[Tensor], dict[str, Tensor]]]
"""Copies of one rank's weights, by piece, and of its buffers, small and large."""


@final
class Values:
    """All that a round averages."""

    def __init__(self, site: Site, rule: OuterRule, wire: Wire, *, average_state: bool) -> None:
        alone = site.comm.size == 1
        # One rank without an outer optimizer has nothing to average, and adding its delta back would round.
        parts = [] if alone and rule.is_plain else fragments_of(site.params, wire.fragments)
        self._fragments = [[_piece(run, rule, wire, site.comm) for run in runs_of(part)] for part in parts]
        self._pieces = [piece for fragment in self._fragments for piece in fragment]
        self._buffers = None if alone else Buffers(site.model, site.device, site.local_buffers)
        self._moments = Moments(site.params, site.optimizer) if average_state and not alone else None
        self._optimizer = site.optimizer
        self.has_momentum = rule.momentum > 0
        """Whether the outer optimizer keeps a velocity."""
        self.compresses = wire.codec is not None
        """Whether ranks keep what they have not sent."""

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """Set the optimizer that moves the parameters: a strategy may have replaced the user's."""
        self._optimizer = optimizer
        if self._moments is not None:
            self._moments.optimizer = optimizer

    @property
    def has_state(self) -> bool:
        """Whether optimizer state is averaged too."""
        return self._moments is not None

    def layout(self) -> float:
        """Return the hash of the optimizer state's layout; 0.0 where state is not averaged."""
        return 0.0 if self._moments is None else self._moments.layout_hash()

    def _master(self, param: Tensor) -> Tensor | None:
        master: Tensor | None = self._optimizer.state[param].get(MASTER) if param in self._optimizer.state else None
        return master

    # --- one round ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take the current values, equal on all ranks, as the anchor."""
        for piece in self._pieces:
            piece.begin(self._master)
        if self._buffers is not None:
            self._buffers.begin()

    def _part(self, fragment: int | None) -> tuple[list[FlatPiece], Buffers | None]:
        """Return what a round averages: all of it, or one fragment, of which the last takes the buffers with it."""
        if fragment is None or not self._fragments:
            return self._pieces, self._buffers
        return self._fragments[fragment], self._buffers if fragment == len(self._fragments) - 1 else None

    def launch(self, share: float, under_way: Round, *, among_all: bool) -> list[Pending]:
        """Send everything, in one order on every rank: the pieces first."""
        comm, trains_on = under_way.comm, under_way.trains_on
        pieces, buffers = self._part(under_way.fragment)
        if among_all:
            pending = [piece.launch(share, comm, self._master, trains_on=trains_on) for piece in pieces]
        else:
            pending = [piece.launch_inside(share, comm, self._master) for piece in pieces]
        if buffers is not None:
            pending += buffers.launch(comm, trains_on=trains_on, with_integers=among_all)
        if under_way.with_state and self._moments is not None:
            pending += self._moments.launch(share, comm)
        return pending

    def needs_relay(self) -> bool:
        """Return whether a round under way needs a second exchange, the same on all ranks."""
        return any(piece.needs_relay for piece in self._pieces)

    def relay(self, under_way: Round) -> None:
        """Start the second exchange: every rank is here, and has launched the first one of each piece."""
        for number, piece in enumerate(self._part(under_way.fragment)[0]):
            under_way.pending[number].wait()
            under_way.pending[number] = piece.relay(under_way.comm)

    def settle(self, under_way: Round, *, among_all: bool) -> None:
        """Write the means; each piece is settled as soon as it arrives, while the next may still be under way."""
        pieces, buffers = self._part(under_way.fragment)
        for number, piece in enumerate(pieces):
            under_way.pending[number].wait()
            (piece.settle if among_all else piece.settle_inside)(self._master)
        for rest in under_way.pending[len(pieces) :]:
            rest.wait()
        if buffers is not None:
            buffers.settle(size=under_way.comm.size, inside=not among_all)
        if under_way.with_state and self._moments is not None:
            self._moments.settle()

    def news(self) -> dict[str, float]:
        """Return the buffers' fields of this rank's row."""
        return {} if self._buffers is None else self._buffers.news()

    def apply_reports(self, rows: Sequence[Row], comm: Comm) -> None:
        """Act on what the rows report about buffers, after a round of all ranks. Collective."""
        if self._buffers is not None:
            self._buffers.apply_reports(rows, comm)

    # --- averaged() ---------------------------------------------------------------------------------------------

    def own(self, rows: Sequence[Row]) -> Own:
        """Copy this rank's weights and buffers, to put them back to the bit."""
        weights = [[param.clone() for param in piece.params] for piece in self._pieces]
        return weights, self._buffers.own(rows) if self._buffers is not None else ([], {})

    def put_back(self, own: Own) -> None:
        for piece, kept in zip(self._pieces, own[0], strict=True):
            torch._foreach_copy_(piece.params, kept)
        if self._buffers is not None:
            self._buffers.put_back(own[1])

    def show_mean(self, rows: Sequence[Row], comm: Comm) -> None:
        """Write the mean of all ranks' weights and buffers; a round under way is not touched. Collective."""
        means = [torch.empty_like(piece.anchor) for piece in self._pieces]
        pending = []
        for piece, mean in zip(self._pieces, means, strict=True):
            piece.read(mean, self._master)
            pending.append(comm.all_reduce(mean.sub_(piece.anchor).div_(comm.size)))
        for piece, mean, sent in zip(self._pieces, means, pending, strict=True):
            sent.wait()
            torch._foreach_copy_(piece.params, piece.views(mean.add_(piece.anchor)))
        if self._buffers is not None:
            self._buffers.show_mean(rows, comm)

    # --- resume -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "anchor": self._by_name(lambda piece: piece.anchor),
            "velocity": self._by_name(lambda piece: piece.velocity) if self.has_momentum else None,
            "buffers": None if self._buffers is None else self._buffers.state_dict(),
        }

    def kept(self) -> dict[str, Tensor]:
        """Return what this rank has not sent yet, by name; empty where everything is sent."""
        return self._by_name(lambda piece: piece.kept)

    def round_state(self, fragment: int | None) -> dict[str, Any]:
        """Return the state of a round under way that has arrived."""
        merged: dict[str, Any] = {"mean": {}, "sent": {}, "share": 1.0}
        for piece in self._part(fragment)[0]:
            for key, value in piece.round_state().items():
                merged[key] = value if key == "share" else merged.get(key, {}) | value
        return merged

    def _by_name(self, part: Callable[[FlatPiece], Tensor | None]) -> dict[str, Tensor]:
        return {name: t for piece in self._pieces for name, t in piece.by_name(part(piece)).items()}

    def load_state_dict(self, state: Mapping[str, Any], kept: Mapping[str, Tensor], *, kept_share: float) -> None:
        """Load anchor, velocity, buffers and `kept_share` of what was not sent; what was not saved (one rank alone has no
        anchor) starts from the weights."""
        self.begin()
        for piece in self._pieces:
            if state["anchor"]:
                piece.put(piece.anchor, state["anchor"])
            if piece.velocity is not None and state["velocity"]:
                piece.put(piece.velocity, state["velocity"])
            if piece.kept is not None and kept:
                piece.put(piece.kept, kept)
                piece.kept.mul_(kept_share)
        if self._buffers is not None and state["buffers"] is not None:
            self._buffers.load_state_dict(state["buffers"])

    def check_round(self, state: Mapping[str, Any]) -> None:
        """Raise if this run cannot take up a round that was under way. Nothing is changed."""
        waiting = {name: tuple(rows.shape) for name, rows in state.get("received", {}).items()}
        for piece in self._part(state.get("fragment"))[0]:
            fits = (
                piece.takes_bytes(waiting[piece.names[0]])
                if piece.names[0] in waiting
                else set(piece.names) <= set(state["mean"])
            )
            if not fits:
                raise CheckpointError(
                    "it was saved while an averaging was under way, whose bytes are cut in another way than this run's. Resume "
                    "with the wire_dtype, top_k and fragments that it was saved with, or save right after optimizer.average()."
                )

    def load_round(self, state: Mapping[str, Any]) -> list[Pending]:
        """Take up a round that was under way; return what to wait for, for each piece of it."""
        pieces = self._part(state.get("fragment"))[0]
        for piece in pieces:
            piece.load_round(state)
        return [Pending(None) for _ in pieces]


def _piece(run: Run, rule: OuterRule, wire: Wire, comm: Comm) -> FlatPiece:
    if wire.codec is None or comm.size == 1:  # of one rank alone nothing travels
        return Piece(run, rule, wire.dtype)
    return CompressedPiece(run, rule, wire, comm)
