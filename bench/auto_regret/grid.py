"""The fixed grid of bench/auto_regret, and plans of it that live side by side, each with a model of its own, to be measured.

    precision {float32, bfloat16} x merge {1, 4} x reducer {dense, bf16_allreduce, powersgd 4, dgc 0.999, localsgd 8}

each without recompute, and where it does not fit into a budget so, with recompute as `auto` would have it.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.auto_regret.models import Net, fresh
from fleetx import fleet
from fleetx.auto import candidate as candidates
from fleetx.auto.candidate import Candidate
from fleetx.auto.clock import typical
from fleetx.auto.cost import Reducer
from fleetx.engine.dry_run import Rehearsal
from fleetx.engine.setup.bind import give_up, rehearsal_of
from fleetx.errors import FleetWarning
from fleetx.recompute.budget_solver import least_peak
from fleetx.recompute.memory_probe import memory_probe_for
from fleetx.recompute.planner import Planner
from fleetx.recompute.profile import peak_bytes

PRECISIONS = ("float32", "bfloat16")
MERGES = (1, 4)
REDUCERS = (
    Reducer(),
    Reducer.named("bf16_allreduce"),
    Reducer.named("powersgd", 4),
    Reducer.named("dgc", 0.999),
    Reducer.named("localsgd", 8),
)
EVERYTHING = "everything on"
BUDGET_SHARE = 0.5
"""Of the way from the least peak that recompute can reach to that of a plain step."""
SECONDS = 1.5
"""Of the timed updates of one turn, about."""
SLOW_S = 0.4
"""A 16-bit update that takes longer is timed once in a turn, and warmed up in the first alone."""


@dataclass(frozen=True)
class Counts:
    """Of the timed updates of one turn."""

    fewest: int = 4
    most: int = 12
    fewest_periods: int = 3
    """Of Local SGD."""


def grid(rows: int) -> list[Candidate]:
    return [
        Candidate(precision, rows, merge, reducer, grows_batch=merge > 1)
        for precision in PRECISIONS
        for merge in MERGES
        for reducer in REDUCERS
    ]


def everything_on(rows: int) -> Candidate:
    """All that a user could switch on, every repeated block computed again."""
    return Candidate("bfloat16", rows, 4, Reducer.named("dgc", 0.999), recomputes=True, grows_batch=True)


def narrow_auto() -> None:
    """Let `auto` choose from this grid: of its own merges and periods from those that are measured here."""
    candidates.MERGES = MERGES  # type: ignore[assignment]
    candidates.offered = lambda context: list(REDUCERS)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The overview of each strategy, each budget's plan, and that 16 bits are slow here."""
    with contextlib.redirect_stdout(None), warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        yield


def slowest(seconds: float) -> float:
    return float(fleet.util.all_reduce(seconds, "max"))


@dataclass
class Pair:
    """One plan, bound to a model of its own."""

    name: str
    candidate: Candidate
    rehearsal: Rehearsal
    is_slow: bool = False
    update_s: float = 0.0
    """As warmed up: how many more are made follows from it."""

    @property
    def samples(self) -> int:
        return self.candidate.batch * self.candidate.merge_steps * fleet.worker_num()

    def update(self, times: int = 1) -> None:
        one = self.rehearsal
        for _ in range(times * self.candidate.merge_steps):
            one.optimizer.minimize(one.loss_fn(one.model, one.sample.renewed()))

    def warm(self) -> None:
        """The first update makes what is kept, and Local SGD's is dense; unless that was slow, a second says how long one is."""
        with quiet():
            self.update_s = slowest(clocked(self.update))
            if self.candidate.precision == "float32" or self.update_s <= SLOW_S:
                self.update_s = slowest(clocked(self.update))
        self.is_slow = self.candidate.precision != "float32" and self.update_s > SLOW_S

    def drop(self) -> None:
        give_up(self.rehearsal.model, self.rehearsal.optimizer)


def bound(net: Net, candidate: Candidate, budget: int | None, *, name: str | None = None) -> Pair:
    """A ConfigError, on all ranks, where no plan of recompute keeps to the budget."""
    model, optimizer, batch = fresh(net)
    strategy = replace(candidate, reducer=candidate.reducer.steady()).strategy(budget)
    with quiet():
        model, face = fleet.distribute(model, optimizer, strategy, sample=batch, loss_fn=net.loss)
    return Pair(name or candidate.name, candidate, rehearsal_of(model, face, batch, net.loss))


def clocked(work: Callable[[], Any]) -> float:
    """Seconds; all ranks begin together."""
    fleet.barrier_worker()
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def timed(pair: Pair, counts: Counts, *, is_first: bool) -> tuple[float, int]:
    """Seconds of an update, by the estimator that `auto` has, on the slowest rank; and of how many. Local SGD: whole periods."""
    period = pair.candidate.reducer.period
    if pair.is_slow:
        return _timed_once(pair, period), 1
    if not is_first:
        pair.update()  # what lay idle while the others had their turn is slow at first
    wanted = min(counts.most, max(counts.fewest, round(SECONDS / pair.update_s)))
    rounds = wanted if period == 1 else max(counts.fewest_periods, round(wanted / period))
    seconds = [clocked(lambda: pair.update(period)) / period for _ in range(rounds)]
    return slowest(typical(seconds)), rounds * period


def _timed_once(pair: Pair, period: int) -> float:
    """Of Local SGD an update without an averaging, and its share of one."""
    seconds = clocked(pair.update)
    if period > 1:
        seconds += clocked(pair.rehearsal.optimizer.average) / period
    return slowest(seconds)


def peak_of(pair: Pair) -> int:
    """Bytes in use at most, in one update; of Local SGD in a whole period, which has an averaging. The larger of the ranks."""
    probe = memory_probe_for(pair.rehearsal.device, pair.rehearsal.lasting)
    with probe.watching():
        pair.update(pair.candidate.reducer.period)
        found = probe.peak()
    return int(slowest(found))


def peaks(net: Net, rows: int) -> tuple[int, int]:
    """Predict the peak of a plain step, and the least of any plan of recompute. Leaves no trace."""
    pair = bound(net, Candidate(batch=rows), None)
    with quiet(), pair.rehearsal.leaving_no_trace():
        profile = Planner(pair.rehearsal).profile()
    found = peak_bytes(profile, ()), least_peak(profile).peak_bytes
    pair.drop()
    return int(slowest(found[0])), int(slowest(found[1]))


def budget_between(plain: int, least: int) -> int:
    return int(least + BUDGET_SHARE * (plain - least))


def with_recompute(candidate: Candidate) -> Candidate:
    return replace(candidate, recomputes=True)
