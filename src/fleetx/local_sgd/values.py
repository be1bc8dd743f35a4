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
from .buffers import Buffers
from .moments import MASTER, Moments
from .outer import OuterRule
from .pieces import Piece, pieces_of

Own: TypeAlias = tuple[list[list[Tensor]], tuple[list[Tensor], dict[str, Tensor]]]
"""Copies of one rank's weights, by piece, and of its buffers, small and large."""


@final
class Values:
    """All that a round averages."""

    def __init__(self, site: Site, rule: OuterRule, wire_dtype: torch.dtype, *, average_state: bool) -> None:
        alone = site.comm.size == 1
        # One rank without an outer optimizer has nothing to average, and adding its delta back would round.
        self._pieces = [] if alone and rule.is_plain else pieces_of(site.params, rule, wire_dtype)
        self._buffers = None if alone else Buffers(site.model, site.device, site.local_buffers)
        self._moments = Moments(site.params, site.optimizer) if average_state and not alone else None
        self._optimizer = site.optimizer
        self.has_momentum = rule.momentum > 0
        """Whether the outer optimizer keeps a velocity."""

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
            piece.read(piece.anchor, self._master)
            if piece.velocity is not None:
                piece.velocity.zero_()
        if self._buffers is not None:
            self._buffers.begin()

    def launch(self, share: float, comm: Comm, *, trains_on: bool, among_all: bool, with_state: bool) -> list[Pending]:
        """Send everything, in one order on every rank: the pieces first."""
        pending = [piece.launch(share, comm, self._master, trains_on=trains_on) for piece in self._pieces]
        if self._buffers is not None:
            pending += self._buffers.launch(comm, trains_on=trains_on, with_integers=among_all)
        if with_state and self._moments is not None:
            pending += self._moments.launch(share, comm)
        return pending

    def settle(self, pending: list[Pending], size: int, *, among_all: bool, with_state: bool) -> None:
        """Write the means; each piece is settled as soon as it arrives, while the next may still be under way."""
        for number, piece in enumerate(self._pieces):
            pending[number].wait()
            (piece.settle if among_all else piece.settle_inside)(self._master)
        for rest in pending[len(self._pieces) :]:
            rest.wait()
        if self._buffers is not None:
            self._buffers.settle(size=size, inside=not among_all)
        if with_state and self._moments is not None:
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

    def round_state(self) -> dict[str, Any]:
        """Return the state of a round under way that has arrived."""
        share = self._pieces[0].sent_share if self._pieces else 1.0
        mean, sent = self._by_name(lambda piece: piece.wire), self._by_name(lambda piece: piece.sent)
        return {"mean": mean, "sent": sent, "share": share}

    def _by_name(self, part: Callable[[Piece], Tensor | None]) -> dict[str, Tensor]:
        return {name: t for piece in self._pieces for name, t in piece.by_name(part(piece)).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load anchor, velocity and buffers; what was not saved (one rank alone has no anchor) starts from the weights."""
        self.begin()
        for piece in self._pieces:
            piece.trains_on = False
            if state["anchor"]:
                piece.put(piece.anchor, state["anchor"])
            if piece.velocity is not None and state["velocity"]:
                piece.put(piece.velocity, state["velocity"])
        if self._buffers is not None and state["buffers"] is not None:
            self._buffers.load_state_dict(state["buffers"])

    def load_round(self, state: Mapping[str, Any]) -> list[Pending]:
        for piece in self._pieces:
            piece.put(piece.wire, state["mean"])
            if state["sent"]:
                piece.sent, piece.sent_share, piece.trains_on = torch.empty_like(piece.wire), float(state["share"]), True
                piece.put(piece.sent, state["sent"])
        return [Pending(None) for _ in self._pieces]
