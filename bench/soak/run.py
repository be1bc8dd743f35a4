"""A soak: jobs of several hosts, one strategy after the other, under random faults. Do all end with the bits of a calm run?

    python -m bench.soak.run --minutes 120                      needs root: hosts are network namespaces, the disk a small tmpfs
    python -m bench.soak.run --jobs 2 --job_seconds 20 --every 5 --name ""      a short one; `--processes` without namespaces

Each job trains twice: calmly and without pauses, for its bits, then with pauses that stand for the time of a real step, while one
fault after the other happens at random times: ranks and launchers are killed or stopped, links cut both ways or one way, disks
full, folders deleted, clocks moved. The only help is that of a machine's keeper: a launcher that was killed is started again.

goodput       time that the updates take without faults, as a share of the time from the first to the last one
load_5min     how many processes of the machine wanted a core in the last five minutes, this job's and others'
differences   jobs whose end has other bits than the calm run; failed: jobs that did not end with 0 everywhere
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bench.lib.netns import cluster, why_not
from bench.lib.nodes_job import PORT, Loopback, NodesJob, Place
from bench.lib.results import publish
from bench.soak.faults import FAULTS, NEEDS_A_SMALL_DISK, NEEDS_HOSTS, Scene
from bench.soak.worker import STRATEGIES

WORKER = Path(__file__).with_name("worker.py")
CLOCK_FOLDER = Path(__file__).with_name("clock")
DISK_BYTES = 8 * 2**20
QUIET_SHARE = 0.1
"""Of the updates, at the end: a launcher that is killed once others have ended would wait for them."""
SLOWEST = 6.0
"""Longest time of a job, calm or not, in multiples of that of its updates; and a minute."""
TOLD_CHARACTERS = 20_000


@dataclass(frozen=True)
class Settings:
    job_seconds: float
    every_seconds: float
    pause_seconds: float
    longest_seconds: float
    chance: random.Random

    @property
    def steps(self) -> int:
        return max(20, round(self.job_seconds / (self.pause_seconds + 0.01)))

    @property
    def limit_seconds(self) -> float:
        return SLOWEST * self.job_seconds + 60.0


@contextlib.contextmanager
def places(count: int, *, processes: bool) -> Iterator[tuple[Sequence[Place], int]]:
    """Hosts, or this machine under several addresses; and the port at which they meet."""
    if processes:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        yield [Loopback(f"127.0.0.{number + 1}") for number in range(count)], port
    else:
        with cluster(hosts=count) as made:
            yield made, PORT


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small file system on the folder, if that is allowed; return whether it was."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def make_job(where: Sequence[Place], port: int, strategy: str, out: Path, disk: Path, steps: int, pause: float) -> NodesJob:
    arguments = ["--out", str(out), "--disk", str(disk), "--strategy", strategy, "--steps", str(steps), "--pause", str(pause)]
    flags = ["--max_restart", "1000", "--log_dir", str(disk / "log"), "--log_max_mb", "1", "--tee", "none"]
    variables = {node: {"FLEETX_SOAK_CLOCK": str(out / f"clock-{node}")} for node in range(len(where))}
    return NodesJob(where, WORKER, arguments, out, flags, port, [CLOCK_FOLDER], variables)


def calm_run(where: Sequence[Place], port: int, strategy: str, out: Path, settings: Settings) -> list[str | None]:
    """Return the fingerprint of each rank's end."""
    job = make_job(where, port, strategy, out, out / "disk", settings.steps, 0.0)
    (out / "disk").mkdir(parents=True)
    try:
        job.start()
        codes = job.wait(settings.limit_seconds)
        if any(codes) or None in codes or None in job.finals():
            raise SystemExit(f"the calm run of {strategy} ended with {codes}:\n{job.told(0)[-2000:]}")
        return job.finals()
    finally:
        job.close()


def soaked_run(where: Sequence[Place], port: int, strategy: str, out: Path, settings: Settings) -> dict[str, Any]:
    """Train under faults; return what happened."""
    steps, chance = settings.steps, settings.chance
    with small_disk(out / "disk") as is_small:
        job = make_job(where, port, strategy, out, out / "disk", steps, settings.pause_seconds)
        clocks = [out / f"clock-{node}" for node in range(len(where))]
        scene = Scene(job, out / "disk", clocks, chance, settings.longest_seconds)
        kinds = [
            kind
            for kind in FAULTS
            if not (kind in NEEDS_HOSTS and isinstance(where[0], Loopback)) and (is_small or kind not in NEEDS_A_SMALL_DISK)
        ]
        limit = time.monotonic() + settings.limit_seconds
        try:
            job.start()
            happened = _disturb(scene, kinds, settings, limit)
            codes = job.wait(max(limit - time.monotonic(), 1.0))
            return {
                "faults": happened,
                "codes": codes,
                "finals": job.finals(),
                "goodput": _goodput(job, steps),
                "told": [job.told(node)[-TOLD_CHARACTERS:] for node in range(len(where))],
            }
        finally:
            job.close()


def _disturb(scene: Scene, kinds: Sequence[str], settings: Settings, limit: float) -> list[tuple[str, str]]:
    """Let faults happen until most updates are done; return kind and words of each."""
    happened: list[tuple[str, str]] = []
    job, last = scene.job, round(settings.steps * (1 - QUIET_SHARE))
    if not job.wait_for(lambda: job.step() > 0, 60.0):
        return happened
    while True:
        pause_until = time.monotonic() + min(settings.chance.expovariate(1 / settings.every_seconds), 3 * settings.every_seconds)
        job.wait_for(lambda until=pause_until: time.monotonic() > until or job.step() >= last, limit - time.monotonic())  # type: ignore[misc]
        if job.step() >= last or time.monotonic() > limit or any(code is not None for code in job.codes()):
            return happened
        kind = settings.chance.choice(kinds)
        words = FAULTS[kind](scene)
        happened.append((kind, words))
        print(f"  step {job.step()}: {words}", flush=True)


def _goodput(job: NodesJob, steps: int) -> float:
    """Return the time of all updates by the median of an update's, as a share of the time from the first to the last one."""
    notes = job.notes(0)
    if len(notes) < 3:
        return 0.0
    gaps = [after.seconds - before.seconds for before, after in itertools.pairwise(notes) if after.pid == before.pid]
    return min(1.0, (steps - 1) * statistics.median(gaps) / (notes[-1].seconds - notes[0].seconds))


def one_job(number: int, strategy: str, host_count: int, settings: Settings, folder: Path, *, processes: bool) -> dict[str, Any]:
    print(f"job {number}: {strategy} on {host_count} hosts, {settings.steps} updates", flush=True)
    with places(host_count, processes=processes) as (where, port):
        expected = calm_run(where, port, strategy, folder / f"calm-{number}", settings)
        began = time.monotonic()
        found = soaked_run(where, port, strategy, folder / f"soaked-{number}", settings)
    has_failed = any(code != 0 for code in found["codes"])
    outcome = "FAILED" if has_failed else "same bits" if found["finals"] == expected else "OTHER BITS"
    print(f"  {outcome}, codes {found['codes']}, goodput {found['goodput']:.3f}, {len(found['faults'])} faults", flush=True)
    for node, text in enumerate(found["told"] if outcome != "same bits" else ()):
        print(f"  node {node} told:\n{text}", flush=True)
    return {
        "strategy": strategy,
        "hosts": host_count,
        "seconds": round(time.monotonic() - began, 1),
        "updates": settings.steps,
        "faults": [words for _, words in found["faults"]],
        "kinds": [kind for kind, _ in found["faults"]],
        "outcome": outcome,
        "goodput": round(found["goodput"], 4),
        "load_5min": round(os.getloadavg()[1], 2),
    }


def summary(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = sum(job["seconds"] for job in jobs)
    return {
        "jobs": len(jobs),
        "hours": round(seconds / 3600, 3),
        "faults": sum(len(job["kinds"]) for job in jobs),
        "faults_by_kind": dict(Counter(kind for job in jobs for kind in job["kinds"])),
        "differences": sum(job["outcome"] == "OTHER BITS" for job in jobs),
        "failed": sum(job["outcome"] == "FAILED" for job in jobs),
        "goodput": round(sum(job["goodput"] * job["seconds"] for job in jobs) / max(seconds, 1e-9), 4),
        "every_job": list(jobs),
    }


def flags_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="no further job begins after this time (default: 120)")
    parser.add_argument("--jobs", type=int, default=10**6, help="at most so many jobs")
    parser.add_argument("--job_seconds", type=float, default=240.0, help="time of a job's updates without faults (default: 240)")
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds between two faults (default: 60)")
    parser.add_argument("--longest", type=float, default=6.0, help="longest stop, cut or full disk, in seconds (default: 6)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of sleep in each update (default: 0.05)")
    parser.add_argument("--hosts", default="2,3", help="numbers of hosts, taken in turn (default: 2,3)")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="taken in turn (default: all)")
    parser.add_argument("--processes", action="store_true", help="without namespaces, and so without cuts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="soak", help="of the file in bench/results; empty: none is written")
    return parser.parse_args(argv)


def leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)  # as an exception, so that hosts, disks and processes are gone afterwards


def main(argv: Sequence[str] | None = None) -> int:
    args = flags_of(argv)
    signal.signal(signal.SIGTERM, leave)
    if not args.processes and (reason := why_not()) is not None:
        raise SystemExit(f"soak: {reason}; or give --processes")
    settings = Settings(args.job_seconds, args.every, args.pause, args.longest, random.Random(args.seed))
    strategies, counts = args.strategies.split(","), [int(word) for word in args.hosts.split(",")]
    began, jobs = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        while len(jobs) < args.jobs and time.monotonic() - began < 60 * args.minutes:
            number = len(jobs)
            strategy, count = strategies[(args.seed + number) % len(strategies)], counts[number % len(counts)]
            jobs.append(one_job(number, strategy, count, settings, Path(name), processes=args.processes))
            if args.name:
                publish(args.name, summary(jobs))  # after each job: what ends a soak early leaves what it found
    figures = summary(jobs)
    if not args.name:
        print(json.dumps(figures))
    return int(figures["differences"] + figures["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
