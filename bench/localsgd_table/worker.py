"""One rank of the throughput part of bench/localsgd_table: all methods in turns, block by block, over whole periods.

    python -m bench.cluster.run --hosts 2 --rate 1000 bench/localsgd_table/worker.py '{"model": "mlp", "out": "rows.jsonl"}'

A shared machine is not always equally fast: so every method makes one block in each turn, in an order that moves on. A block is
of whole periods, and ends when all ranks have met. A step is a period's share of its time, the median of all. ADACOMM's
periods vary: it goes through a training in miniature, with the learning rate falling in a line, and its step is the mean over
all of it. Post-local SGD is synchronous in the first half of the turns; its step is the mean of both parts by their shares.
Rank 0 appends a line of JSON for each row.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.lib.link_bytes import payload_bytes
from bench.localsgd_table.contest import LR, Contestant, NotHere, cases, contestant
from bench.localsgd_table.methods import ADACOMM, ALONE, METHODS, POST_LOCAL, Settings, first_period
from fleetx import fleet

PERIODS_IN_BLOCK = {1: 4, 2: 2}
"""Of longer ones one."""
WARM_STEPS, LONG = 2, 4
MINIATURE_STEPS, MINIATURE_BEGIN = 40, 2
DENSE_BLOCK = 3
TURNS = 4


class Clock:
    """Steps of one contestant, timed, with what this rank put on the wire in them: by the reports, and by its link."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.interface = os.environ.get("GLOO_SOCKET_IFNAME")
        self.made, self.counted_bytes, self.counts = 0, 0, False
        self.rounds_at: list[int] = []

    def step(self, lr: float = LR) -> float:
        """Its seconds."""
        start = time.perf_counter()
        report = self.contestant.step(lr)
        seconds = time.perf_counter() - start
        self.made += 1
        if report is not None:
            self.counts = True
            self.counted_bytes += report.bytes_sent
            if report.averaged:
                self.rounds_at.append(self.made)
        return seconds

    def steps(self, count: int) -> float:
        return sum(self.step() for _ in range(count))

    def sent(self) -> int | None:
        """By the link's own counter; None where no link is known."""
        return None if self.interface is None else payload_bytes(self.interface)


class Part:
    """What several blocks of one kind have in common: seconds of each whole period, and the bytes of a step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.shares: list[float] = []
        self.seconds, self.steps, self.link_bytes, self.counted_bytes = 0.0, 0, 0, 0

    def block(self, period: int, count: int) -> None:
        def periods() -> None:
            for _ in range(count):
                self.note(self.clock.steps(period), period)

        self.metered(periods)

    def note(self, seconds: float, period: int) -> None:
        self.shares.append(seconds / period)
        self.seconds += seconds
        self.steps += period

    def metered(self, timed: Callable[[], None]) -> None:
        fleet.util.barrier()
        counted, sent = self.clock.counted_bytes, self.clock.sent()
        timed()
        fleet.util.barrier()  # who is past it has all that the others sent
        self.counted_bytes += self.clock.counted_bytes - counted
        self.link_bytes += (self.clock.sent() or 0) - (sent or 0)

    def bytes_per_step(self) -> tuple[float | None, float | None]:
        """By the link, and by the reports."""
        link = None if self.clock.interface is None else self.link_bytes / self.steps
        return link, self.counted_bytes / self.steps if self.clock.counts else None


class FixedRow:
    """One period for ever; that of synchronous training is 1."""

    def __init__(self, clock: Clock, period: int) -> None:
        self.clock, self.period, self.part = clock, period, Part(clock)

    def warm(self) -> None:
        first = self.clock.contestant.first_round
        # A long period is mostly computation, and warm after one update; on a slow link each averaging saved is seconds.
        self.clock.steps(first + (self.period if self.period <= LONG else 0))

    def block(self, turn: int) -> None:
        self.part.block(self.period, PERIODS_IN_BLOCK.get(self.period, 1))

    def figures(self) -> dict[str, Any]:
        shares = self.part.shares
        step, bounds = statistics.median(shares), [ms(min(shares)), ms(max(shares))]
        return {"step_ms": ms(step), "range_ms": bounds, **told_bytes(*self.part.bytes_per_step()), "steps": self.part.steps}


class PostLocalRow:
    def __init__(self, clock: Clock, settings: Settings, turns: int) -> None:
        self.clock, self.period, self.share = clock, settings.post_local_k, settings.post_local_share
        self.dense_turns = turns // 2
        self.dense, self.local = Part(clock), Part(clock)

    def warm(self) -> None:
        self.clock.steps(WARM_STEPS)

    def block(self, turn: int) -> None:
        if turn < self.dense_turns:
            self.dense.block(1, DENSE_BLOCK)
        else:
            self.local.block(self.period, 1)

    def figures(self) -> dict[str, Any]:
        early, late = (statistics.median(part.shares) for part in (self.dense, self.local))
        sent = [self._mixed(*pair) for pair in zip(self.dense.bytes_per_step(), self.local.bytes_per_step(), strict=True)]
        steps = self.dense.steps + self.local.steps
        return {"step_ms": ms(self._mixed(early, late)), "parts_ms": [ms(early), ms(late)], **told_bytes(*sent), "steps": steps}

    def _mixed(self, early: float | None, late: float | None) -> Any:
        return None if early is None or late is None else self.share * early + (1 - self.share) * late


class AdaptiveRow:
    """From the last synchronous update on: each block goes on to the averaging that ends its last period."""

    def __init__(self, clock: Clock, turns: int) -> None:
        self.clock, self.turns, self.part = clock, turns, Part(clock)

    def warm(self) -> None:
        self.clock.steps(MINIATURE_BEGIN)

    def block(self, turn: int) -> None:
        target = MINIATURE_BEGIN + (turn + 1) * (MINIATURE_STEPS - MINIATURE_BEGIN) / self.turns
        if self.clock.made < target:
            self.part.metered(lambda: self._periods(target))

    def _periods(self, target: float) -> None:
        while self.clock.made < target:
            before, rounds, seconds = self.clock.made, len(self.clock.rounds_at), 0.0
            while len(self.clock.rounds_at) == rounds:
                seconds += self.clock.step(falling(self.clock.made + 1))
            self.part.note(seconds, self.clock.made - before)

    def figures(self) -> dict[str, Any]:
        periods = [after - before for before, after in itertools.pairwise([MINIATURE_BEGIN, *self.clock.rounds_at])]
        mean = self.part.seconds / self.part.steps
        return {"step_ms": ms(mean), "periods": periods, **told_bytes(*self.part.bytes_per_step()), "steps": self.part.steps}


Row = FixedRow | PostLocalRow | AdaptiveRow


def falling(step: int) -> float:
    """The learning rate of a training in miniature: in a line, to a last step that still learns a little."""
    left = max(1, MINIATURE_STEPS + 1 - step)
    return LR * min(1.0, left / (MINIATURE_STEPS + 1 - MINIATURE_BEGIN))


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def told_bytes(link: float | None, counted: float | None) -> dict[str, int | None]:
    both = {"link_bytes_per_step": link, "counted_bytes_per_step": counted}
    return {name: None if value is None else round(value) for name, value in both.items()}


def begin_of(method: str, turns: int) -> int:
    return {ADACOMM: MINIATURE_BEGIN, POST_LOCAL: WARM_STEPS + DENSE_BLOCK * (turns // 2)}.get(method, 1)


def row_of(method: str, clock: Clock, settings: Settings, turns: int) -> Row:
    if method == ADACOMM:
        return AdaptiveRow(clock, turns)
    if method == POST_LOCAL:
        return PostLocalRow(clock, settings, turns)
    return FixedRow(clock, first_period(method, settings))


def order(methods: Sequence[str], turn: int) -> list[str]:
    """Each turn begins with another method."""
    first = turn * len(methods) // TURNS % len(methods)
    return [*methods[first:], *methods[:first]]


def measure(plan: Mapping[str, Any]) -> None:
    """Every row of a plan, on every rank; `facts` go into each line."""
    settings, turns = Settings(**plan.get("settings", {})), plan.get("turns", TURNS)
    case = cases(plan.get("width", 32))[plan["model"]]
    rows: dict[str, Row] = {}
    figures: dict[str, dict[str, Any]] = {}
    for method in (methods := [ALONE, *plan.get("methods", METHODS)]):
        try:
            made = contestant(method, case, settings, begin_of(method, turns))
        except NotHere as error:
            figures[method] = {"why_not": str(error)}
            continue
        rows[method] = row_of(method, Clock(made), settings, turns)
        rows[method].warm()
    for turn in range(turns):
        for method in order(list(rows), turn):
            rows[method].block(turn)
        fleet.util.print_on_rank(f"{plan['model']}: turn {turn + 1} of {turns} is over", 0)
    ranks = fleet.worker_num()
    for method, one in rows.items():
        found = one.figures()
        figures[method] = {**found, "samples_per_s": round(ranks * case.batch / found["step_ms"] * 1e3, 2), "ranks": ranks}
        one.clock.contestant.close()
    common = {"part": "throughput", "model": plan["model"], "batch": case.batch, "turns": turns, "settings": asdict(settings)}
    if fleet.is_first_worker():
        records = [{**common, "method": method, **figures[method], **plan.get("facts", {})} for method in methods]
        with Path(plan["out"]).open("a") as lines:
            lines.write("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
        print("\n".join(map(told, records)), flush=True)


def told(record: Mapping[str, Any]) -> str:
    head = f"{record['model']:8} {record['method']:20}"
    if "why_not" in record:
        return f"{head} not measured: {record['why_not']}"
    sent = record["link_bytes_per_step"]
    wire = "" if sent is None else f", {sent / 1e6:6.2f} MB a step"
    periods = f", periods {record['periods']}" if "periods" in record else ""
    timed = f"{record['step_ms']:8.1f} ms a step, {record['samples_per_s']:8.1f} samples/s"
    return f"{head} {timed}{wire}{periods} ({record['steps']} steps)"


def main(arguments: Sequence[str]) -> int:
    fleet.init()
    measure(json.loads(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
