"""Fill AVERAGE: ranks train alone for a period, then average. One engine for Local SGD, post-local, adaptive and DiLoCo.

    update `begin`      the last dense one: all ranks are equal, and their weights become the anchor
    update t            a round is launched when the period is over: the ranks exchange their status rows, and send their
                        deltas from the anchor; of a model in F fragments one of them, every F-th part of a period
    update t + overlap  the round is settled: the anchor takes the outer step, the weights follow

When to launch and when to settle depend on the update's index and on the rows of all ranks, and on nothing else: every rank
takes part in every round, whether or not it has skipped updates of its own.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
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
from .wire import Wire

SMOOTHING = 0.9
"""Weight of the old value in the running mean of the loss."""


@final
class Averaging:
    """Run the rounds of one model."""

    def __init__(self, site: Site, *, begin_step: int, period: Period, rule: OuterRule, wire: Wire, average_state: bool) -> None:
        self._comm, self._device = site.comm, site.device
        self._begin_step, self.period_rule, self._wire = begin_step, period, wire
        self.needs_loss = period.needs_loss
        self._values = Values(site, rule, wire, average_state=average_state)
        self._inside = two_level(site.comm).inside if wire.across_nodes_every > 1 else site.comm
        self._apply_rows: Callable[[], Callable[[list[Row]], None] | None] = lambda: None
        """Weak reference to what acts on the ranks' rows: requests to stop, errors, loss scales."""
        self._begun = False
        self._next = 0
        """Index of the update after which the next round is launched."""
        self._rounds = 0
        """Rounds launched by the schedule."""
        self._round: Round | None = None
        self._loss: Tensor | None = None
        self._weights = [0.0] * wire.fragments
        """Sums of the losses' weights since the last round of all ranks, for each fragment of the model."""
        self._weight_inside = 0.0
        """The same since the last round of any kind."""
        self._weighted = False
        self._waited = -1.0
        """Seconds that this rank waited for the others in the last round of all ranks; -1.0: none so far."""
        self.waits: dict[int, float] | None = None
        """Seconds that each rank waited for the others in the round before the last; None: not known yet."""
        self.keeps_ranks_equal = False
        """Whether the last round left the same weights on all of its ranks."""
        self._showing_mean = False
        self._warned = False

    # --- what the step reads --------------------------------------------------------------------------------------

    def attach(self, *, update: torch.optim.Optimizer, on_round: Callable[[list[Row]], None]) -> None:
        """Connect the engine: `update` is the optimizer that moves the parameters; `on_round` acts on all ranks' rows, and may
        raise on all of them."""
        self._apply_rows = weakref.WeakMethod(on_round)  # a cycle would keep a discarded pair alive until the next collection
        self._values.use_optimizer(update)

    @property
    def begun(self) -> bool:
        """Whether each rank makes the next update alone; until then updates are dense."""
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

    def meets(self, index: int) -> bool:
        """Return whether rows may be exchanged after this update: the first period begins, or a round is launched or settled."""
        settles = self._round is not None and index >= self._round.settle_at
        return index >= self._begin_step and (not self._begun or settles or index >= self._next)

    @torch.no_grad()
    def __call__(self, step: Step, news: News) -> bool:
        """Launch and settle rounds, after every update, made or skipped. Returns whether one of all ranks was settled."""
        self._note(news)
        if step.index < self._begin_step:
            return False
        if not self._begun:
            self._begin(step, news)
            return False
        if self._round is not None and 0 < self._round.relay_at <= step.index:
            self._relay(self._round)
        settled = self._settle_if_due(step.index)
        if step.index >= self._next and self._round is None:
            self._launch(step, news)
            settled = self._settle_if_due(step.index) or settled
        return settled

    def _settle_if_due(self, index: int) -> bool:
        return self._round is not None and index >= self._round.settle_at and self._settle(index)

    def _note(self, news: News) -> None:
        self._weighted = news.weight is not None
        self._weights = [weight + (news.weight or 0.0) for weight in self._weights]
        self._weight_inside += news.weight or 0.0
        if not self.needs_loss or news.loss is None:
            return
        loss = news.loss.double()
        before = loss if self._loss is None else torch.where(self._loss.isfinite(), self._loss, loss)
        # A loss that is not finite belongs to an update that was skipped, or whose error the next round reports.
        self._loss = torch.where(loss.isfinite(), SMOOTHING * before + (1 - SMOOTHING) * loss, before)

    def _begin(self, step: Step, news: News) -> None:
        """Start the first period: all ranks have the same weights, which become the anchor."""
        self._values.begin()
        self._begun = True
        if self.needs_loss:
            gathered, pending = tell(self._row(step, news), self._comm)
            pending.wait()
            rows = rows_of(gathered)
            self.period_rule.begin(_mean_loss(rows), rows[0].lr)
        self._next = step.index + self._interval()
        self._forget_weights()

    def _interval(self) -> int:
        """Return the updates from the last turn to the next: of F fragments each has its turn once in a period."""
        period, fragments, turn = self.period_rule.now, self._wire.fragments, self._rounds % self._wire.fragments
        return (turn + 1) * period // fragments - turn * period // fragments

    def _forget_weights(self, fragment: int | None = None) -> None:
        self._weights = [0.0 if fragment in (None, part) else weight for part, weight in enumerate(self._weights)]
        self._weight_inside = 0.0

    def _launch(self, step: Step, news: News, *, on_demand: bool = False) -> None:
        self._rounds += not on_demand
        among_all = on_demand or self._rounds % self._wire.across_nodes_every == 0
        comm = self._comm if among_all else self._inside
        if comm.size == 1 and not among_all:  # a node of one rank has nothing to average
            return self._advance(step.index)
        settle_at = step.index + (self._wire.overlap_steps if among_all and not on_demand else 0)
        fragment = None if on_demand or self._wire.fragments == 1 else (self._rounds - 1) % self._wire.fragments
        # Of all fragments together the weight is that of the one whose last round is the longest ago.
        weight = max(self._weights) if fragment is None else self._weights[fragment]
        call = ON_DEMAND if on_demand else BY_SCHEDULE
        row = self._row(step, news)._replace(call=call, weight=weight if among_all else self._weight_inside)
        under_way = Round(step.index, settle_at, comm, *tell(row, comm), [], fragment=fragment)
        # Where training does not go on meanwhile, or shares or layouts must be known first, the rows are awaited here: all
        # ranks then act on one rank's error or request to stop before anything is sent.
        if not under_way.trains_on or self._weighted or self._values.has_state:
            self._receive_rows(under_way)
        self._send(under_way)
        self._round = under_way
        self._weight_inside = 0.0
        if among_all:
            self._forget_weights(fragment)
        return None

    def _send(self, under_way: Round) -> None:
        comm, among_all = under_way.comm, under_way.comm is self._comm
        rows = under_way.rows() if under_way.rows_pending is None else []
        share = share_of(rows, comm.rank) if rows else 1 / comm.size
        under_way.with_state = among_all and self._values.has_state and len({row.layout for row in rows}) == 1
        under_way.pending = self._values.launch(share, under_way, among_all=among_all)
        if self._values.needs_relay():
            # In the middle of the overlap, at the same update on every rank: each half of the exchange has as long to travel.
            under_way.relay_at = under_way.launched_at + (under_way.settle_at - under_way.launched_at + 1) // 2
        if not among_all:
            self._comm.bytes_sent, comm.bytes_sent = self._comm.bytes_sent + comm.bytes_sent, 0.0

    def _relay(self, under_way: Round) -> None:
        """Start the second exchange of a round. Every rank comes here after the same update, with the same round under way, so
        that none waits for a collective that another has not started."""
        under_way.relay_at = 0
        self._values.relay(under_way)

    def _settle(self, index: int, *, on_demand: bool = False) -> bool:
        """Finish the round under way, on all of its ranks. Returns whether it was one of all ranks."""
        under_way = self._round
        assert under_way is not None
        self._receive_rows(under_way)
        if under_way.relay_at:
            self._relay(under_way)
        self._round, among_all = None, under_way.comm is self._comm
        self.keeps_ranks_equal = not under_way.trains_on and under_way.fragment is None
        self._values.settle(under_way, among_all=among_all)
        if not on_demand:
            if among_all:
                self._renew_period(under_way)
            self._advance(index, launched_at=under_way.launched_at)
        if among_all:
            self._values.apply_reports(under_way.rows(), self._comm)
        if among_all and self._values.has_state and not under_way.with_state:
            self._warn_of_layouts(under_way)  # after the last collective: warnings may be turned into errors
        return among_all

    def _receive_rows(self, under_way: Round) -> None:
        """Wait for the other ranks' rows and act on them, on all ranks alike; only rows of a round of all ranks are acted on."""
        if under_way.rows_pending is None:
            return
        start = time.perf_counter()
        under_way.rows_pending.wait()
        under_way.rows_pending = None
        require_together(under_way.rows())
        if under_way.comm is self._comm:
            self._waited, before = time.perf_counter() - start, self._waited
            rows = under_way.rows()
            self.waits = {rank: row.waited for rank, row in enumerate(rows)} if before >= 0 else None
            apply_rows = self._apply_rows()
            if apply_rows is not None:
                apply_rows(rows)

    def _renew_period(self, under_way: Round) -> None:
        rows = under_way.rows()
        line = self.period_rule.after_round(under_way.launched_at, _mean_loss(rows), rows[0].lr)
        if line is not None and self._comm.rank == 0:
            log.say(line)

    def _advance(self, index: int, *, launched_at: int | None = None) -> None:
        """Schedule the next round: not before this one is settled, and later than it was launched."""
        launched_at = index if launched_at is None else launched_at
        self._next = max(self._next + self._interval(), index, launched_at + 1)

    def _row(self, step: Step, news: News) -> Row:
        flips, mark = news.flips()
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
            flips=flips,
            mark=mark,
            **self._values.news(),
        )

    def _warn_of_layouts(self, under_way: Round) -> None:
        if not self._warned and self._comm.rank == 0:
            self._warned = True
            warn_user(
                f"average_state: at update {under_way.launched_at} some ranks have optimizer state that others have not yet "
                "(they skipped updates, or left parameters unused). This averaging leaves the state as it is.",
            )

    # --- now, on demand -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_now(self, step: Step, news: News) -> None:
        """Run a whole round of all ranks now, and leave the schedule as it is. Collective."""
        self.refuse_inside()
        if not self._begun:
            return
        if self._round is not None:
            self._settle(step.index)
        self._launch(step, news, on_demand=True)
        self._settle(step.index, on_demand=True)

    @contextlib.contextmanager
    def mean_shown(self, index: int) -> Iterator[None]:
        """Show the mean of all ranks' weights and statistics inside, each rank's own bits afterwards. Collective."""
        self.refuse_inside()
        # In the dense phase too, so that a call made by one rank alone is an error at once, and not late in a long run.
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
        """Return the state, without a new collective: a round under way was sent by every rank, and is awaited."""
        state = {
            "begun": self._begun,
            "next": self._next,
            "rounds": self._rounds,
            "period": self.period_rule.state_dict(),
            "loss": self._loss,
            "weights": [*self._weights, self._weight_inside],
            "values": self._values.state_dict() if self._begun else None,
            "flying": self._round_state(),
        }
        # What ranks keep adds up to what the mean has not got yet, so that another number of ranks can share it out.
        kept = self._values.kept() if self._begun else {}
        return state | {"shares": kept} if kept else state

    def _round_state(self) -> dict[str, Any] | None:
        if self._round is None:
            return None
        self._round.arrive()
        return {**self._round.state_dict(), **self._values.round_state(self._round.fragment)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begun, self._next, self._rounds = bool(state["begun"]), int(state["next"]), int(state["rounds"])
        self.period_rule.load_state_dict(state["period"])
        self._loss = None if state["loss"] is None else state["loss"].to(self._device)
        *weights, self._weight_inside = map(float, state["weights"])
        fits = len(weights) == self._wire.fragments  # else it was saved with another number of fragments
        self._weights = weights if fits else [max(weights)] * self._wire.fragments
        self._round, self._waited, self.waits = None, -1.0, None
        if self._begun:
            share = 1 / self._comm.size if "summed_over" in state else 1.0
            self._values.load_state_dict(state["values"], state.get("shares", {}), kept_share=share)
        under_way = state["flying"]
        if under_way is not None:
            self._round = round_from(under_way, self._comm)
            self._round.pending = self._values.load_round(under_way)

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if the state is of another kind of period. Nothing is changed."""
        if set(state["period"]) != set(self.period_rule.state_dict()):
            raise CheckpointError(
                "one of the two runs has a fixed period (localsgd) and the other an adaptive one (adaptive_localsgd). "
                "Resume with the strategy that saved it."
            )
        if state["begun"] and state["values"]["velocity"] and not self._values.has_momentum:
            raise CheckpointError(
                "it was saved with an outer optimizer that has momentum, whose velocity would be lost. Resume with an "
                "outer_momentum above 0."
            )

        if state.get("shares") and not self._values.compresses:
            raise CheckpointError(
                "it was saved with changes that were kept back (wire_dtype int8 or int4, or top_k), which would be lost. Resume "
                "with one of these."
            )
        if state["flying"] is not None:
            self._values.check_round(state["flying"])

    def forget(self) -> None:
        """Start over with dense updates: a checkpoint of a run without averaging was loaded."""
        self._begun, self._round, self._loss = False, None, None
        self._forget_weights()


def _mean_loss(rows: list[Row]) -> float:
    return sum(row.loss for row in rows) / len(rows)
