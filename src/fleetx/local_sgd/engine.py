"""AVERAGE: ranks train alone for a period, then meet. One engine for Local SGD, post-local, adaptive and DiLoCo.

    update `begin`      the last dense one: all ranks are equal, and their weights become the anchor
    update t            a round is launched when the period is over: the ranks tell each other their news, and send what
                        they have moved since the anchor
    update t + overlap  it is settled: the anchor takes the outer step, the weights follow

When to launch and when to settle are functions of the update's index and of what all ranks have told, and of nothing else:
every rank is in every round, whether or not it has skipped updates of its own.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ..config import log
from ..dist.nodes import two_level
from ..engine.rank_status import BY_SCHEDULE, ON_DEMAND, SHOWN, Row, require_together, rows_of, share_of, tell
from ..engine.slots import News, Site, Step
from ..errors import CheckpointError, FleetError, warn_user
from .outer import OuterRule
from .period import Period
from .round import Round, round_from
from .values import Values

SMOOTHING = 0.9
"""What the running mean of the loss keeps from one update to the next."""


@dataclass(frozen=True, slots=True)
class Wire:
    """How a round travels."""

    dtype: torch.dtype = torch.float32
    overlap_steps: int = 0
    across_nodes_every: int = 1


@final
class Averaging:
    def __init__(self, site: Site, *, begin_step: int, period: Period, rule: OuterRule, wire: Wire, average_state: bool) -> None:
        self._comm, self._device = site.comm, site.device
        self._begin_step, self.period_rule, self._wire = begin_step, period, wire
        self.needs_loss = period.needs_loss
        self._values = Values(site, rule, wire.dtype, average_state=average_state)
        self._inside = two_level(site.comm).inside if wire.across_nodes_every > 1 else site.comm
        self._heed: Callable[[], Callable[[list[Row]], None] | None] = lambda: None
        self._begun = False
        self._next = 0
        """The update after which the next round is launched."""
        self._rounds = 0
        self._flying: Round | None = None
        self._loss: Tensor | None = None
        self._weight = self._weight_inside = 0.0
        """Sums of the weights since the last round among all, and since the last of any kind."""
        self._weighted = False
        self._waited = -1.0
        self.waits: dict[int, float] | None = None
        """Seconds in which each rank waited for the others, in the round before the last."""
        self.keeps_ranks_equal = False
        """Whether the last round has left the same weights on all of its ranks."""
        self._showing_mean = False
        self._warned = False

    # --- what others ask ------------------------------------------------------------------------------------------

    def attach(self, *, update: torch.optim.Optimizer, heed: Callable[[list[Row]], None]) -> None:
        """`update`: the optimizer that really moves the parameters. `heed` acts on the ranks' news, and may raise on all."""
        self._heed = weakref.WeakMethod(heed)  # a cycle would keep a discarded pair alive until somebody collects it
        self._values.moved_by(update)

    @property
    def begun(self) -> bool:
        """Whether the coming update is made by each rank alone. Where not, it is dense."""
        return self._begun

    @property
    def period(self) -> int | None:
        return max(self.period_rule.now, self._wire.overlap_steps) if self._begun else None

    def refuse_inside(self) -> None:
        if self._showing_mean:
            raise FleetError(
                "inside `with optimizer.averaged():` the weights are the mean of all ranks', and each rank's own come back at "
                "its end: a step would be lost, and a checkpoint wrong. Train and save outside of it."
            )

    # --- the life of a period ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(self, step: Step, news: News) -> bool:
        """After every update, made or skipped. Whether a round among all ranks was settled."""
        self._note(news)
        if step.index < self._begin_step:
            return False
        if not self._begun:
            self._begin(step, news)
            return False
        settled = self._settle_if_ripe(step.index)
        if step.index >= self._next and self._flying is None:
            self._launch(step, news)
            settled = self._settle_if_ripe(step.index) or settled
        return settled

    def _settle_if_ripe(self, index: int) -> bool:
        return self._flying is not None and index >= self._flying.settle_at and self._settle(index)

    def _note(self, news: News) -> None:
        self._weighted = news.weight is not None
        self._weight += news.weight or 0.0
        self._weight_inside += news.weight or 0.0
        if not self.needs_loss or news.loss is None:
            return
        loss = news.loss.double()
        before = loss if self._loss is None else torch.where(self._loss.isfinite(), self._loss, loss)
        # A loss that is not finite is of an update that was skipped, or soon will be heard of.
        self._loss = torch.where(loss.isfinite(), SMOOTHING * before + (1 - SMOOTHING) * loss, before)

    def _begin(self, step: Step, news: News) -> None:
        """All ranks have the same weights."""
        self._values.begin()
        self._begun = True
        if self.needs_loss:
            gathered, pending = tell(self._row(step, news), self._comm)
            pending.wait()
            rows = rows_of(gathered)
            self.period_rule.begin(_mean_loss(rows), rows[0].lr)
        self._next = step.index + self.period_rule.now
        self._weight = self._weight_inside = 0.0

    def _launch(self, step: Step, news: News, *, on_demand: bool = False) -> None:
        self._rounds += not on_demand
        among_all = on_demand or self._rounds % self._wire.across_nodes_every == 0
        comm = self._comm if among_all else self._inside
        if comm.size == 1 and not among_all:  # a node of one rank has nobody to meet
            return self._advance(step.index)
        settle_at = step.index + (self._wire.overlap_steps if among_all and not on_demand else 0)
        call, weight = ON_DEMAND if on_demand else BY_SCHEDULE, self._weight if among_all else self._weight_inside
        row = self._row(step, news)._replace(call=call, weight=weight)
        flying = Round(step.index, settle_at, comm, *tell(row, comm), [])
        # Where nothing goes on meanwhile, or shares or layouts must be known first, the news is awaited here: a request to
        # stop or an error of one rank is then heard by all before anything is sent.
        if not flying.trains_on or self._weighted or self._values.has_state:
            self._hear(flying)
        self._send(flying)
        self._flying = flying
        self._weight_inside = 0.0
        if among_all:
            self._weight = 0.0
        return None

    def _send(self, flying: Round) -> None:
        comm, among_all = flying.comm, flying.comm is self._comm
        rows = flying.rows() if flying.told is None else []
        share = share_of(rows, comm.rank) if rows else 1 / comm.size
        flying.with_state = among_all and self._values.has_state and len({row.layout for row in rows}) == 1
        flying.pending = self._values.launch(
            share, comm, trains_on=flying.trains_on, among_all=among_all, with_state=flying.with_state
        )
        if not among_all:
            self._comm.bytes_sent, comm.bytes_sent = self._comm.bytes_sent + comm.bytes_sent, 0.0

    def _settle(self, index: int, *, on_demand: bool = False) -> bool:
        """Every rank of the round is here. Whether it was among all of them."""
        flying = self._flying
        assert flying is not None
        self._hear(flying)
        self._flying, among_all = None, flying.comm is self._comm
        self.keeps_ranks_equal = not flying.trains_on
        self._values.settle(flying.pending, flying.comm.size, among_all=among_all, with_state=flying.with_state)
        if not on_demand:
            if among_all:
                self._renew_period(flying)
            self._advance(index, launched_at=flying.launched_at)
        if among_all:
            self._values.heed(flying.rows(), self._comm)
        if among_all and self._values.has_state and not flying.with_state:
            self._warn_of_layouts(flying)  # after the last collective: a warning may have been made an error
        return among_all

    def _hear(self, flying: Round) -> None:
        """Wait for the others' news, and act on it: on all ranks alike. What a node hears alone waits for a round among all."""
        if flying.told is None:
            return
        start = time.perf_counter()
        flying.told.wait()
        flying.told = None
        require_together(flying.rows())
        if flying.comm is self._comm:
            self._waited, before = time.perf_counter() - start, self._waited
            rows = flying.rows()
            self.waits = {rank: row.waited for rank, row in enumerate(rows)} if before >= 0 else None
            heed = self._heed()
            if heed is not None:
                heed(rows)

    def _renew_period(self, flying: Round) -> None:
        rows = flying.rows()
        line = self.period_rule.after_round(flying.launched_at, _mean_loss(rows), rows[0].lr)
        if line is not None and self._comm.rank == 0:
            log.say(line)

    def _advance(self, index: int, *, launched_at: int | None = None) -> None:
        """The next round: not before this one is settled, and later than it was launched."""
        launched_at = index if launched_at is None else launched_at
        self._next = max(self._next + self.period_rule.now, index, launched_at + 1)

    def _row(self, step: Step, news: News) -> Row:
        return Row(
            at=float(step.index),
            stops=float(news.stops),
            failed_at=float(news.failed_at),
            missing=float(news.missing),
            scale=news.scale,
            loss=0.0 if self._loss is None else float(self._loss),
            lr=0.0 if step.lr is None or not self.needs_loss else float(step.lr),
            waited=self._waited,
            layout=self._values.layout(),
            **self._values.news(),
        )

    def _warn_of_layouts(self, flying: Round) -> None:
        if not self._warned and self._comm.rank == 0:
            self._warned = True
            warn_user(
                f"average_state: at update {flying.launched_at} some ranks have optimizer state that others have not yet "
                "(they skipped updates, or left parameters unused). This averaging leaves the state as it is.",
            )

    # --- now, on demand -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_now(self, step: Step, news: News) -> None:
        """A whole round among all, whatever the schedule says, which stays as it is. Every rank calls it."""
        self.refuse_inside()
        if not self._begun:
            return
        if self._flying is not None:
            self._settle(step.index)
        self._launch(step, news, on_demand=True)
        self._settle(step.index, on_demand=True)

    @contextlib.contextmanager
    def mean_shown(self, index: int) -> Iterator[None]:
        """The mean of all ranks' weights and statistics inside, each rank's own bits afterwards. Every rank enters it."""
        self.refuse_inside()
        # Asked in the dense phase too: a call that one rank alone makes should not wait for a long run's end to be found.
        gathered, pending = tell(Row(at=float(index), call=SHOWN, **self._values.news()), self._comm)
        pending.wait()
        rows = rows_of(gathered)
        require_together(rows)
        if not self._begun or self._comm.size == 1:
            yield
            return
        with torch.no_grad():
            own = self._values.own(rows)
            self._values.show_mean(rows, self._comm)
        self._showing_mean = True
        try:
            yield
        finally:
            self._showing_mean = False
            with torch.no_grad():
                self._values.put_back(own)

    # --- resume -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """No collective: what is under way was sent by every rank, and is waited for."""
        return {
            "begun": self._begun,
            "next": self._next,
            "rounds": self._rounds,
            "period": self.period_rule.state_dict(),
            "loss": self._loss,
            "weights": [self._weight, self._weight_inside],
            "values": self._values.state_dict() if self._begun else None,
            "flying": self._flying_state(),
        }

    def _flying_state(self) -> dict[str, Any] | None:
        if self._flying is None:
            return None
        self._flying.arrive()
        return {**self._flying.state_dict(), **self._values.flying_state()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begun, self._next, self._rounds = bool(state["begun"]), int(state["next"]), int(state["rounds"])
        self.period_rule.load_state_dict(state["period"])
        self._loss = None if state["loss"] is None else state["loss"].to(self._device)
        self._weight, self._weight_inside = map(float, state["weights"])
        self._flying, self._waited, self.waits = None, -1.0, None
        if self._begun:
            self._values.load_state_dict(state["values"])
        flying = state["flying"]
        if flying is not None:
            self._flying = round_from(flying, self._comm, self._values.load_flying(flying))

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if this state is of another kind of period; nothing is changed."""
        if set(state["period"]) != set(self.period_rule.state_dict()):
            raise CheckpointError(
                "one of the two runs has a fixed period (localsgd) and the other an adaptive one (adaptive_localsgd). "
                "Resume with the strategy that saved it."
            )

    def forget(self) -> None:
        """A checkpoint of a run without averaging was loaded: the coming update is dense, and begins anew."""
        self._begun, self._flying, self._loss = False, None, None
        self._weight = self._weight_inside = 0.0


def _mean_loss(rows: list[Row]) -> float:
    return sum(row.loss for row in rows) / len(rows)
