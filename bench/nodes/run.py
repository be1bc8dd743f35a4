"""Nodes that are cut off, killed, or beset by strangers: does the job go on, with the bits of a calm run, and how soon?

    python -m bench.nodes.run                        needs root: hosts are network namespaces
    python -m bench.nodes.run --cuts 2 --returns 2 --connections 500 --longest 4 --name ""     a short one

cuts      of the link of one of two nodes, 2 to 55 s, as many both ways as one way. Right: no restart, and the bits of a calm run;
          with --longest beyond the grace of 60 s one restart, since then the node is given up and its return awaited
returns   a launcher is killed, its ranks die with it, and it is started again a few seconds later. Right: the bits of a calm run.
          again_seconds: from the new start to the first update of every rank
flood     so many connections to node 0's port during a run, held open and opened again when they are closed: processor time of
          node 0's launcher, as a share of one core, without and with them

Jobs under test run side by side, since they mostly wait; `load_5min` says how busy the machine was.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import resource
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.lib.link_cut import cut
from bench.lib.netns import Host, why_not
from bench.lib.nodes_job import NodesJob
from bench.lib.results import publish
from bench.soak.run import Settings, calm_run, make_job, places

PAUSE_SECONDS = 0.1
STRATEGIES = ("dense", "localsgd", "powersgd", "dgc")
SHORTEST_SECONDS, LATEST_START_SECONDS = 2.0, 8.0
LIMIT_SECONDS = 400.0
FLOOD_SECONDS = 60.0
GRACE_SECONDS, LATE_SECONDS = 60.0, 8.0
"""Default of --node_grace; and how much later than the cut a node may be heard of last, and be given up."""
SETTINGS = Settings(13.0, 1.0, PAUSE_SECONDS, 0.0, random.Random(0))
STEPS = SETTINGS.steps


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    """One of the directions of a cut, or `return`."""
    node: int
    seconds: float
    strategy: str
    at_step: int


def cases_of(cuts: int, returns: int, longest: float, chance: random.Random) -> list[Case]:
    """Cuts of evenly spread lengths, each length once both ways and once one way; and returns of either node in turn."""
    cases: list[Case] = []

    def add(kind: str, number: int, node: int, seconds: float) -> None:
        strategy, at_step = STRATEGIES[number % len(STRATEGIES)], chance.randint(10, STEPS // 2)
        cases.append(Case(len(cases), kind, node, round(seconds, 2), strategy, at_step))

    for number in range(cuts):
        seconds = SHORTEST_SECONDS + (longest - SHORTEST_SECONDS) * number / max(cuts - 1, 1)
        add("both", number, number % 2, seconds)
        add(("up", "down")[number % 2], number, number // 2 % 2, seconds)
    for number in range(returns):
        add("return", number, number // 2 % 2, chance.uniform(0.0, LATEST_START_SECONDS))
    return cases


def next_step_seconds(job: NodesJob, rank: int, after: float) -> float | None:
    """The time of the first step that the rank has noted after this time."""
    return next((note.seconds for note in job.notes(rank) if note.seconds > after), None)


def one_case(case: Case, expected: list[str | None], folder: Path) -> dict[str, Any]:
    with places(2, processes=False) as (where, port):
        out = folder / f"case-{case.number}"
        (out / "disk").mkdir(parents=True)
        job = make_job(where, port, case.strategy, out, out / "disk", STEPS, PAUSE_SECONDS)
        try:
            job.start()
            if not job.wait_for(lambda: job.step() >= case.at_step, 120.0):
                raise SystemExit(f"case {case} has not begun:\n{job.told(0)[-2000:]}")
            went_seconds = time.monotonic()
            if case.kind == "return":
                job.kill_node(case.node)
                time.sleep(case.seconds)
                job.start_node(case.node)
            else:
                host = where[case.node]
                assert isinstance(host, Host)
                with cut(host, case.kind):
                    time.sleep(case.seconds)
            back_seconds = time.monotonic()
            codes = job.wait(LIMIT_SECONDS)
            again = [next_step_seconds(job, rank, back_seconds) for rank in range(2)]
            restarts = max((note.attempt for rank in range(2) for note in job.notes(rank)), default=0)
            is_lost = case.kind == "return" or case.seconds > GRACE_SECONDS + LATE_SECONDS
            is_right = codes == [0, 0] and job.finals() == expected and restarts == int(is_lost)
            row = {
                **vars(case),
                "codes": codes,
                "has_the_bits": job.finals() == expected,
                "restarts": restarts,
                "away_seconds": round(back_seconds - went_seconds, 2),
                "again_seconds": None if None in again else round(max(filter(None, again)) - back_seconds, 2),
                "is_right": is_right,
            }
            print(json.dumps(row), flush=True)
            if not is_right:
                print(*(f"  node {node} told:\n{job.told(node)[-20_000:]}" for node in range(2)), sep="\n", flush=True)
            return row
        finally:
            job.close()


def run_cases(cases: Sequence[Case], folder: Path, lanes: int) -> list[dict[str, Any]]:
    expected = {}
    for strategy in dict.fromkeys(case.strategy for case in cases):
        with places(2, processes=False) as (where, port):
            expected[strategy] = calm_run(where, port, strategy, folder / f"calm-{strategy}", SETTINGS)
    with concurrent.futures.ThreadPoolExecutor(lanes) as pool:
        return list(pool.map(lambda case: one_case(case, expected[case.strategy], folder), cases))


# --- strangers -------------------------------------------------------------------------------------------------------------


class Flood:
    """So many sockets that connect to a port, and connect again when they are closed."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self._address, self._selector = address, selectors.DefaultSelector()
        self._waiting = deque(range(count))
        self.made = 0

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(min(100, len(self._waiting))):
                self._waiting.popleft()
                self._connect()
            for key, mask in self._selector.select(0.01):
                self._follow(key.fileobj, mask)  # type: ignore[arg-type]
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    def _connect(self) -> None:
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(self._address)
        self._selector.register(one, selectors.EVENT_WRITE)

    def _follow(self, one: socket.socket, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                self.made += 1
                self._selector.modify(one, selectors.EVENT_READ)
                return
        else:
            try:
                if one.recv(4096):
                    return  # the greeting
            except OSError:
                pass
        self._selector.unregister(one)
        one.close()
        self._waiting.append(0)


def flood(count: int, folder: Path) -> dict[str, Any]:
    """Hold `count` connections open against a job of two nodes; return what node 0's launcher spends on them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < count + 200:
        raise SystemExit(f"--connections {count} needs {count + 200} open files; the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    (folder / "disk").mkdir(parents=True)
    with places(2, processes=True) as (where, port):
        job = make_job(where, port, "dense", folder, folder / "disk", 10**6, PAUSE_SECONDS)
        try:
            job.start()
            if not job.wait_for(lambda: job.step() >= 10, 120.0):
                raise SystemExit(f"the job for the flood has not begun:\n{job.told(0)[-2000:]}")
            launcher = psutil.Process(job.launchers[0].pid)

            def share_of_a_core(work: Any) -> tuple[float, int]:
                before, step, began = launcher.cpu_times(), job.step(), time.monotonic()
                work(FLOOD_SECONDS)
                after = launcher.cpu_times()
                spent = after.user + after.system - before.user - before.system
                return spent / (time.monotonic() - began), job.step() - step

            calm, calm_steps = share_of_a_core(time.sleep)
            strangers = Flood((where[0].address, port), count)
            flooded, flooded_steps = share_of_a_core(strangers.run)
            restarts = job.notes(0)[-1].attempt
            codes = job.codes()
            return {
                "connections": count,
                "seconds": FLOOD_SECONDS,
                "connections_made": strangers.made,
                "launcher_share_of_a_core_without": round(calm, 4),
                "launcher_share_of_a_core_with": round(flooded, 4),
                "share_of_the_connections": round(flooded - calm, 4),
                "steps_without": calm_steps,
                "steps_with": flooded_steps,
                "goes_on": codes == [None, None] and restarts == 0 and flooded_steps > 0,
            }
        finally:
            job.close()


# ----------------------------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    groups = {"cuts_both_ways": ("both",), "cuts_one_way": ("up", "down"), "returns": ("return",)}
    for name, kinds in groups.items():
        ours = [row for row in rows if row["kind"] in kinds]
        again = [row["again_seconds"] for row in ours if row["again_seconds"] is not None]
        found[name] = {
            "right": f"{sum(row['is_right'] for row in ours)} of {len(ours)}",
            "again_seconds_median": round(statistics.median(again), 2) if again else None,
            "again_seconds_most": max(again, default=None),
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cuts", type=int, default=20, help="lengths of cuts, each once both ways and once one way (default: 20)"
    )
    parser.add_argument("--longest", type=float, default=55.0, help="seconds of the longest cut (default: 55)")
    parser.add_argument("--returns", type=int, default=20, help="launchers killed and started again (default: 20)")
    parser.add_argument("--connections", type=int, default=10_000, help="connections of strangers; 0: none (default: 10,000)")
    parser.add_argument("--lanes", type=int, default=4, help="jobs that run side by side (default: 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="nodes", help="of the file in bench/results; empty: none is written")
    options = parser.parse_args(argv)
    if (reason := why_not()) is not None:
        raise SystemExit(f"nodes: {reason}")
    with tempfile.TemporaryDirectory() as name:
        figures: dict[str, Any] = {"load_5min": [round(os.getloadavg()[1], 2)]}
        if options.connections:
            figures["flood"] = flood(options.connections, Path(name) / "flood")
            print(json.dumps(figures["flood"]), flush=True)
        cases = cases_of(options.cuts, options.returns, options.longest, random.Random(options.seed))
        rows = run_cases(cases, Path(name), options.lanes)
    figures["load_5min"].append(round(os.getloadavg()[1], 2))
    figures.update(summary(rows), cases=rows)
    if options.name:
        publish(options.name, figures)
    else:
        print(json.dumps(figures))
    return int(not all(row["is_right"] for row in rows) or not figures.get("flood", {"goes_on": True})["goes_on"])


if __name__ == "__main__":
    sys.exit(main())
