"""One rank of the throughput part of bench/localsgd_table.py: all methods one after the other, timed over whole periods.

    python bench/cluster.py --hosts 2 --rate 1000 bench/localsgd_throughput.py '{"model": "mlp", "out": "rows.jsonl"}'

Every time is that of a whole period, which ends when all ranks have met; a step is a period's share, the median of several.
ADACOMM's periods vary: it goes through a training in miniature, with the learning rate falling in a line, and its step is the
mean over all of it. Post-local SGD has two parts, synchronous and local, timed apart; its step is their mean by their shares.
Rank 0 appends a line of JSON for each row.
"""

from __future__ import annotations

import gc
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

from count_bytes import payload_bytes
from fleetx import fleet
from localsgd_contest import LR, Case, Contestant, NotHere, cases, contestant
from localsgd_methods import ADACOMM, ALONE, METHODS, POST_LOCAL, Settings, first_period

LEAST_PERIODS, MOST_STEPS = {1: 3, 2: 3, 4: 3}, 96
"""At least so many periods of this length, of longer ones 2."""
MINIATURE_STEPS, MINIATURE_BEGIN = 40, 2
POST_LOCAL_BEGIN = 5
WARM_STEPS, LONG = 2, 4


class Link:
    """What this rank has put on the wire, by the link's own counter; None where no link is known."""

    def __init__(self) -> None:
        self.interface = os.environ.get("GLOO_SOCKET_IFNAME")

    def sent(self) -> int | None:
        return None if self.interface is None else payload_bytes(self.interface)


class Clock:
    """Steps of one contestant, timed, with what they sent."""

    def __init__(self, contestant: Contestant, link: Link) -> None:
        self.contestant, self.link = contestant, link
        self.made = 0
        self.counted_bytes = 0
        self.counts = False
        self.rounds_at: list[int] = []

    def steps(self, count: int, lr: Callable[[int], float] = lambda step: LR) -> float:
        """Seconds of so many steps."""
        start = time.perf_counter()
        for _ in range(count):
            self.made += 1
            report = self.contestant.step(lr(self.made))
            if report is not None:
                self.counts = True
                self.counted_bytes += report.bytes_sent
                if report.averaged:
                    self.rounds_at.append(self.made)
        return time.perf_counter() - start

    def metered(self, timed: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """What `timed` returns, and the bytes of one of its steps."""
        fleet.util.barrier()
        steps, counted, sent = self.made, self.counted_bytes, self.link.sent()
        result = timed()
        fleet.util.barrier()  # who is past it has all that the others sent
        made, now = self.made - steps, self.link.sent()
        link = None if sent is None or now is None else round((now - sent) / made)
        return result, {
            "steps": made,
            "link_bytes_per_step": link,
            "counted_bytes_per_step": round((self.counted_bytes - counted) / made) if self.counts else None,
        }


def periods_wanted(first: float, period: int, row_seconds: float) -> int:
    """How many periods as long as the first fit in the time of a row, within bounds."""
    most = max(1, MOST_STEPS // period)
    return max(LEAST_PERIODS.get(period, 2), min(most, int(row_seconds / max(first, 1e-9))))


def whole_periods(clock: Clock, period: int, row_seconds: float) -> list[float]:
    """Seconds of each. Rank 0 says how many, so that all stop at the same one."""
    first = clock.steps(period)
    wanted = fleet.util.all_gather(periods_wanted(first, period, row_seconds))[0]
    return [first, *(clock.steps(period) for _ in range(wanted - 1))]


def fixed_row(clock: Clock, period: int, row_seconds: float) -> dict[str, Any]:
    first = clock.contestant.first_round
    # A long period is mostly computation, and warm after one update; on a slow link each averaging saved is seconds.
    clock.steps(first + (period if period <= LONG else 0))
    seconds, figures = clock.metered(lambda: whole_periods(clock, period, row_seconds))
    shares = [one / period for one in seconds]
    return {"step_ms": ms(statistics.median(shares)), "range_ms": [ms(min(shares)), ms(max(shares))], **figures}


def alone_row(clock: Clock, row_seconds: float) -> dict[str, Any]:
    clock.steps(WARM_STEPS)
    seconds, figures = clock.metered(lambda: whole_periods(clock, 1, row_seconds / 3))
    return {"step_ms": ms(statistics.median(seconds)), "range_ms": [ms(min(seconds)), ms(max(seconds))], **figures}


def post_local_row(clock: Clock, settings: Settings, row_seconds: float) -> dict[str, Any]:
    clock.steps(WARM_STEPS)
    dense, first = clock.metered(lambda: [clock.steps(1) for _ in range(POST_LOCAL_BEGIN - WARM_STEPS)])
    period = settings.post_local_k
    local, second = clock.metered(lambda: whole_periods(clock, period, row_seconds / 2))
    early, late = statistics.median(dense), statistics.median(one / period for one in local)
    share = settings.post_local_share

    def mixed(name: str) -> int | None:
        return None if first[name] is None else round(share * first[name] + (1 - share) * second[name])

    names = ("link_bytes_per_step", "counted_bytes_per_step")
    return {
        "step_ms": ms(share * early + (1 - share) * late),
        "parts_ms": [ms(early), ms(late)],
        "steps": first["steps"] + second["steps"],
        **{name: mixed(name) for name in names},
    }


def falling(step: int) -> float:
    """The learning rate of a training in miniature: in a line, to a last step that still learns a little."""
    return LR * min(1.0, (MINIATURE_STEPS + 1 - step) / (MINIATURE_STEPS + 1 - MINIATURE_BEGIN))


def adaptive_row(clock: Clock) -> dict[str, Any]:
    """Timed from the last synchronous update to the last averaging: each period with the averaging that ends it."""
    clock.steps(MINIATURE_BEGIN, falling)
    seconds: list[float] = []
    _, figures = clock.metered(lambda: seconds.extend(clock.steps(1, falling) for _ in range(MINIATURE_BEGIN, MINIATURE_STEPS)))
    timed = clock.rounds_at[-1] - MINIATURE_BEGIN
    figures = {name: None if value is None else round(value * figures["steps"] / timed) for name, value in figures.items()}
    periods = [after - before for before, after in itertools.pairwise([MINIATURE_BEGIN, *clock.rounds_at])]
    return {"step_ms": ms(sum(seconds[:timed]) / timed), "periods": periods, **figures, "steps": timed}


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def row(method: str, case: Case, settings: Settings, link: Link, row_seconds: float) -> dict[str, Any]:
    begin = {ADACOMM: MINIATURE_BEGIN, POST_LOCAL: POST_LOCAL_BEGIN}.get(method, 1)
    try:
        made = contestant(method, case, settings, begin)
    except NotHere as error:
        return {"why_not": str(error)}
    clock = Clock(made, link)
    try:
        if method == ADACOMM:
            figures = adaptive_row(clock)
        elif method == POST_LOCAL:
            figures = post_local_row(clock, settings, row_seconds)
        elif method == ALONE:
            figures = alone_row(clock, row_seconds)
        else:
            figures = fixed_row(clock, first_period(method, settings), row_seconds)
    finally:
        made.close()
    ranks = fleet.worker_num()
    return {**figures, "samples_per_s": round(ranks * case.batch / figures["step_ms"] * 1e3, 2), "ranks": ranks}


def order(methods: Sequence[str]) -> list[str]:
    """Training without communication in front, in the middle and at the end: a shared machine is not always equally fast."""
    middle = len(methods) // 2
    return [ALONE, *methods[:middle], ALONE, *methods[middle:], ALONE]


def measure(plan: Mapping[str, Any]) -> None:
    """Every row of a plan, on every rank; `facts` go into each line."""
    settings, facts = Settings(**plan.get("settings", {})), plan.get("facts", {})
    case = cases(plan.get("width", 32))[plan["model"]]
    for method in order(plan.get("methods", METHODS)) * plan.get("turns", 1):
        began = time.perf_counter()
        figures = row(method, case, settings, Link(), plan.get("row_seconds", 10.0))
        gc.collect()  # a model of the row before is in cycles with its hooks
        record = {"part": "throughput", "model": plan["model"], "method": method, "batch": case.batch, **figures, **facts}
        record["settings"] = asdict(settings)
        if fleet.is_first_worker():
            record["row_seconds"] = round(time.perf_counter() - began, 1)
            with Path(plan["out"]).open("a") as lines:
                lines.write(json.dumps(record, allow_nan=False) + "\n")
            print(told(record), flush=True)
        fleet.util.barrier()


def told(record: Mapping[str, Any]) -> str:
    head = f"{record['model']:8} {record['method']:20}"
    if "why_not" in record:
        return f"{head} not measured: {record['why_not']}"
    sent = record["link_bytes_per_step"]
    wire = "" if sent is None else f", {sent / 1e6:6.2f} MB a step"
    periods = f", periods {record['periods']}" if "periods" in record else ""
    return (
        f"{head} {record['step_ms']:8.1f} ms a step, {record['samples_per_s']:8.1f} samples/s{wire}"
        f"{periods} ({record['steps']} steps, row of {record['row_seconds']} s)"
    )


def main(arguments: Sequence[str]) -> int:
    fleet.init()
    measure(json.loads(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
