"""One rank of bench/auto_regret: one net on one link. All plans of the grid live here and go in turns; then `auto` is asked.

Rank 0 appends a line of JSON for each figure, as soon as it is there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.auto_regret.grid import (
    EVERYTHING,
    Counts,
    Pair,
    bound,
    budget_between,
    everything_on,
    grid,
    narrow_auto,
    peak_of,
    peaks,
    slowest,
    timed,
    with_recompute,
)
from bench.auto_regret.models import fresh, net_of
from fleetx import fleet
from fleetx.auto.candidate import Candidate
from fleetx.auto.measurements import Forecast, forecast
from fleetx.auto.plan import Plan
from fleetx.engine.setup.bind import give_up
from fleetx.errors import ConfigError, first_line
from fleetx.recompute.batches import rows_in

TURNS = 2
FAR = 3.0
"""A 16-bit plan that takes so many times as long as the fastest, for a sample, is out of the question: what memory it needs, and
how much slower still recompute makes it, is not measured."""


class Cell:
    """A net on a link."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.net = job, net_of(job["model"])
        (self.rows,) = rows_in(fresh(self.net)[2])
        self.pairs: dict[str, Pair] = {}
        self.measured_peaks: dict[str, int] = {}
        self.counts = Counts(**job["counts"])
        self.begun = time.monotonic()

    def keep(self, kind: str, **figures: Any) -> None:
        if not fleet.is_first_worker():
            return
        known = {key: self.job[key] for key in ("run", "model", "rate_mbit")}
        line = {"kind": kind, **known, "at_s": round(time.monotonic() - self.begun, 1), **figures}
        with Path(self.job["out"]).open("a") as lines:
            lines.write(json.dumps(line, allow_nan=False) + "\n")

    def run(self) -> None:
        """`auto` is asked first: which blocks are computed again to keep to a budget is a part of its plans."""
        budgets = self.budgets()
        self.add_plain()
        for budget in budgets:
            for risk in self.job["risks"]:
                plan = self.ask(budget, risk)
                if budget is not None:
                    self.add_recomputed(budget, plan)
                self.add_chosen(plan, budget)
        for turn in range(TURNS):
            self.measure(list(self.pairs.values()), turn)
        self.keep("end")

    def budgets(self) -> list[int | None]:
        plain, least = peaks(self.net, self.rows)
        tight = budget_between(plain, least)
        model = fresh(self.net)[0]
        facts = {"numel": sum(p.numel() for p in model.parameters()), "rows": self.rows, "ranks": fleet.worker_num()}
        self.keep(
            "cell", about=self.net.about, **facts, plain_bytes=plain, least_bytes=least, tight_bytes=tight, **self.job["facts"]
        )
        return [{"none": None, "tight": tight}[name] for name in self.job["budgets"]]

    # --- the grid -----------------------------------------------------------------------------------------------------------

    def add_plain(self) -> None:
        """Everything without recompute, and what "everything on" is."""
        for candidate in grid(self.rows):
            self.add(bound(self.net, candidate, None))
        fastest = min(per_sample(pair) for pair in self.pairs.values())
        for pair in self.pairs.values():
            if pair.candidate.precision == "float32" or per_sample(pair) <= FAR * fastest:
                self.measured_peaks[pair.name] = peak_of(pair)
            self.tell(pair, None)
        self.add(bound(self.net, everything_on(self.rows), None, name=EVERYTHING))
        self.measured_peaks[EVERYTHING] = peak_of(self.pairs[EVERYTHING])
        self.tell(self.pairs[EVERYTHING], None)

    def add_recomputed(self, budget: int, plan: Plan) -> None:
        for name, peak in list(self.measured_peaks.items()):
            candidate = foreseen(self.pairs[name].candidate, plan, budget)
            if name == EVERYTHING or peak <= budget or candidate.name in self.pairs:
                continue
            try:
                pair = bound(self.net, candidate, budget)
            except ConfigError as error:
                self.keep("refused", name=candidate.name, budget=budget, why=first_line(error))
                continue
            self.add(pair)
            self.measured_peaks[pair.name] = peak_of(pair)
            self.tell(pair, budget)

    def add(self, pair: Pair) -> None:
        pair.warm()
        self.pairs[pair.name] = pair

    def tell(self, pair: Pair, budget: int | None) -> None:
        """`budget`: of its recompute."""
        risk, peak = pair.candidate.risk.value, self.measured_peaks.get(pair.name)
        self.keep("plan", name=pair.name, risk=risk, budget=budget, samples=pair.samples, peak_bytes=peak)

    def measure(self, pairs: Sequence[Pair], turn: int) -> None:
        """In the second turn the other way round: who went first goes last."""
        for pair in pairs if turn == 0 else reversed(pairs):
            seconds, updates = timed(pair, self.counts, is_first=turn == 0)
            self.keep("time", name=pair.name, turn=turn, seconds=seconds, updates=updates)
            self.say(f"turn {turn + 1}: {pair.name:36} {1e6 * seconds / pair.samples:10.1f} us a sample ({updates} updates)")

    # --- auto ---------------------------------------------------------------------------------------------------------------

    def ask(self, budget: int | None, risk: str) -> Plan:
        model, optimizer, batch = fresh(self.net)
        strategy = fleet.DistributedStrategy(auto=True, auto_configs={"risk": risk, "memory": budget})
        begun = time.perf_counter()
        model, face = fleet.distribute(model, optimizer, strategy, sample=batch, loss_fn=self.net.loss)
        seconds = slowest(time.perf_counter() - begun)
        plan = face.plan
        give_up(model, face)
        assert plan is not None
        row = plan.row(plan.chosen)
        self.keep(
            "asked",
            budget=budget,
            risk=risk,
            seconds=seconds,
            chosen=plan.chosen,
            tried={one.name: one.measured_s for one in plan.rows},
            chosen_peak_bytes=row.measured_bytes,
            hidden_share=plan.measured.hidden_share,
            missing=dict(plan.measured.missing),
            forecasts=self.forecasts(plan, budget),
        )
        return plan

    def add_chosen(self, plan: Plan, budget: int | None) -> None:
        """Where the grid does not have it: recompute for a plan that fits without, by the gauge."""
        if plan.chosen in self.pairs:
            return
        choices = [*grid(self.rows), *(foreseen(one, plan, budget) for one in grid(self.rows))]
        pair = bound(self.net, next(one for one in choices if one.name == plan.chosen), budget)
        self.add(pair)
        self.measured_peaks[pair.name] = peak_of(pair)
        self.tell(pair, budget)

    def forecasts(self, plan: Plan, budget: int | None) -> dict[str, Any]:
        """Return what `auto` predicts of each plan within the budget, by the plan without recompute; or why it does not."""
        found: dict[str, Any] = {}
        for candidate in grid(self.rows):
            told = forecast(plan.measured, candidate, memory=budget)
            if isinstance(told, Forecast):
                name, peak = told.candidate.name, told.peak_bytes
                found[candidate.name] = {"name": name, "seconds": told.cost.seconds, "peak_bytes": peak}
            else:
                found[candidate.name] = {"refused": told}
        return found

    def say(self, line: str) -> None:
        if fleet.is_first_worker():
            print(line, flush=True)


def foreseen(candidate: Candidate, plan: Plan, budget: int | None) -> Candidate:
    """With recompute as `auto` would have it; where it has no plan, by the budget itself."""
    told = forecast(plan.measured, candidate, memory=budget)
    return told.candidate if isinstance(told, Forecast) and told.candidate.recomputes else with_recompute(candidate)


def per_sample(pair: Pair) -> float:
    return pair.update_s / pair.samples


def main(job: dict[str, Any]) -> None:
    fleet.init()
    narrow_auto()
    Cell(job).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
