"""What happens when things break: ranks killed in mid-step, launchers killed at any time, ranks that stop.

kills     a random rank is SIGKILLed at a random step; the run restarts and must end with the bits of an undisturbed one
restarts  the same in mid-training, with ranks forked from a warm process and, in turn, with --warm_restart off
signals   SIGKILL, SIGTERM, SIGINT, SIGHUP to the launcher, at start, in a step, in a save, in a restart
stops     SIGSTOP of one rank: how long until it is named
torchrun meets the same kills, with the same script and the same number of restarts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.lib.results import publish

WORKER = Path(__file__).with_name("worker.py")
MARK = "FLEETX_FAULTS_MARK"
LIMIT_SECONDS = 120.0
GONE_SECONDS = 2.0
VARIANTS: tuple[tuple[str, ...], ...] = (("--merge", "3", "--fp16"), (), ("--merge", "3"), ("--fp16",))
SPEAKS = {"fleetrun": "fleetrun: ", "torchrun": "torch/distributed/elastic"}
"""What is in each line of the launcher's own: a rank's last words are not yet a rank that was seen to die."""


@dataclass
class Job:
    """A launcher, what it says and when, and what its ranks note."""

    launcher: str
    ranks: int
    arguments: tuple[str, ...]
    out: Path
    restarts: int = 1
    flags: tuple[str, ...] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    lines: list[tuple[float, str]] = field(default_factory=list)

    def start(self) -> None:
        (self.out / "notes").mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, MARK: self.mark, "FLEETX_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "FLEETX_VERBOSE": "2"}
        with (self.out / "stdout").open("wb") as stdout:
            self.process = subprocess.Popen(
                [*self._command(), str(WORKER), "--out", str(self.out), *self.arguments],
                stdout=stdout,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
                start_new_session=True,
                cwd=self.out,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _command(self) -> list[str]:
        if self.launcher == "fleetrun":
            flags = ["--nproc_per_node", str(self.ranks), "--max_restart", str(self.restarts)]
            return [sys.executable, "-m", "fleetx.launch", *flags, *self.flags]
        flags = ["--standalone", "--nproc-per-node", str(self.ranks), "--max-restarts", str(self.restarts)]
        return [sys.executable, "-m", "torch.distributed.run", *flags]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip()))

    def notes(self, rank: int, what: str = "step") -> list[tuple[int, int, int, float]]:
        """(attempt, step, pid, seconds) of each note of this kind."""
        path = self.out / "notes" / str(rank)
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            fields = line.split()
            if len(fields) == 5 and fields[4] == what:
                found.append((int(fields[0]), int(fields[1]), int(fields[2]), int(fields[3]) / 1e9))
        return found

    def wait_for(self, holds: Callable[[], bool], limit_seconds: float = LIMIT_SECONDS) -> bool:
        limit = time.monotonic() + limit_seconds
        while not holds():
            if time.monotonic() > limit or self.process.poll() is not None:
                return holds()
            time.sleep(0.002)
        return True

    def end(self, limit_seconds: float = LIMIT_SECONDS) -> int | None:
        """The exit code; None if it had to be killed."""
        try:
            code: int | None = self.process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        for process in self.alive():
            process.kill()
        self.process.wait()
        self._reader.join(5)
        return code

    def alive(self) -> list[psutil.Process]:
        """Every process that descends from this job, told by its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def pss_mib(self) -> float:
        """Memory of the ranks and of the warm process, shared pages counted once."""
        pids = [p for p in self.alive() if "worker.py" in " ".join(p.cmdline())]
        return round(sum(p.memory_full_info().pss for p in pids) / 2**20, 1)

    def finals(self) -> list[str]:
        paths = [self.out / f"final-{rank}.json" for rank in range(self.ranks)]
        return [json.loads(path.read_text())["sha256"] for path in paths if path.exists()]


# --- kills ----------------------------------------------------------------------------------------------------------


def undisturbed(ranks: int, variant: tuple[str, ...], folder: Path) -> str:
    job = Job("fleetrun", ranks, (*variant, "--pause", "0"), folder / f"whole-{ranks}-{'-'.join(variant)}")
    job.start()
    code = job.end()
    finals = set(job.finals())
    if code != 0 or len(finals) != 1:
        raise SystemExit(f"the undisturbed run failed ({code}, {finals}):\n" + "\n".join(line for _, line in job.lines[-20:]))
    return finals.pop()


def kill_once(launcher: str, ranks: int, variant: tuple[str, ...], out: Path, chance: random.Random) -> dict[str, Any]:
    victim, step = chance.randrange(ranks), chance.randrange(1, 58)
    job = Job(launcher, ranks, variant, out)
    job.start()
    job.wait_for(lambda: any(s >= step for _, s, _, _ in job.notes(victim)))
    time.sleep(chance.uniform(0, 0.02))  # anywhere in the step
    pid = job.notes(victim)[-1][2]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    code = job.end(60.0)
    after = [seconds for seconds, line in job.lines if seconds > killed and SPEAKS[launcher] in line]
    again = [[s for attempt, _, _, s in job.notes(rank) if attempt > 0] for rank in range(ranks)]
    return {
        "victim": victim,
        "step": step,
        "code": code,
        "finals": job.finals(),
        "seen_seconds": min(after) - killed if after else None,
        "back_seconds": max(times[0] for times in again) - killed if all(again) else None,
        "told": [line for _, line in job.lines][-3:],
    }


def campaign_kills(runs: int, peer_runs: int, folder: Path, chance: random.Random) -> dict[str, Any]:
    cases = [(ranks, variant) for ranks in (2, 4) for variant in VARIANTS][: max(runs, 1)]
    expected = {case: undisturbed(*case, folder) for case in cases}
    figures: dict[str, Any] = {}
    for launcher, count in (("fleetrun", runs), ("torchrun", peer_runs)):
        trials = []
        for number in range(count):
            case = cases[number % len(cases)]
            trial = kill_once(launcher, *case, folder / f"{launcher}-{number}", chance)
            trial["same_bits"] = trial["code"] == 0 and trial["finals"] == [expected[case]] * case[0]
            trials.append(trial)
            outcome = "same bits" if trial["same_bits"] else f"FAILED {trial['told']}"
            print(
                f"{launcher} {number + 1}/{count} {case}: rank {trial['victim']} at step {trial['step']}: {outcome}", flush=True
            )
        figures[launcher] = summary(trials)
    return figures


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    seen = sorted(t["seen_seconds"] for t in trials if t["seen_seconds"] is not None)
    back = sorted(t["back_seconds"] for t in trials if t["back_seconds"] is not None)
    return {
        "runs": len(trials),
        "same_bits": sum(t["same_bits"] for t in trials),
        "seen_seconds_median": round(statistics.median(seen), 3) if seen else None,
        "seen_seconds_worst": round(seen[-1], 3) if seen else None,
        "back_seconds_median": round(statistics.median(back), 2) if back else None,
        "back_seconds_worst": round(back[-1], 2) if back else None,
    }


# --- how long a restart takes --------------------------------------------------------------------------------------------

LONG = ("--steps", "240", "--pause", "0.05")
IS_WARM = "a restart would fork its ranks from process"


def restart_once(ranks: int, warm: str, out: Path, chance: random.Random) -> dict[str, Any]:
    """Kill a rank in mid-training, when the warm process is ready; without one, after 50 steps."""
    job = Job("fleetrun", ranks, LONG, out, flags=("--warm_restart", warm))
    job.start()
    job.wait_for(lambda: len(job.notes(0)) > 50 and (warm == "off" or any(IS_WARM in line for _, line in job.lines)))
    before = job.pss_mib()
    victim = chance.randrange(ranks)
    load, pid = os.getloadavg()[0], job.notes(victim)[-1][2]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    job.wait_for(lambda: all(any(attempt > 0 for attempt, *_ in job.notes(rank)) for rank in range(ranks)))
    after = job.pss_mib()
    code = job.end()
    seen = [seconds - killed for seconds, line in job.lines if "restarting" in line]
    firsts = {
        what: max(next(s for attempt, _, _, s in job.notes(rank, what) if attempt > 0) for rank in range(ranks)) - killed
        for what in ("loaded", "step")
    }
    return {
        "seen_seconds": seen[0],
        "loaded_seconds": firsts["loaded"],
        "back_seconds": firsts["step"],
        "load": load,
        "pss_mib_before": before,
        "pss_mib_after": after,
        "code": code,
        "finals": job.finals(),
    }


def campaign_restarts(runs: int, folder: Path, chance: random.Random) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for ranks in (2, 4):
        expected = undisturbed(ranks, LONG[:2], folder)
        trials: dict[str, list[dict[str, Any]]] = {"auto": [], "off": []}
        for number in range(runs):
            for warm, made in trials.items():
                trial = restart_once(ranks, warm, folder / f"restart-{ranks}-{warm}-{number}", chance)
                trial["same_bits"] = trial["code"] == 0 and trial["finals"] == [expected] * ranks
                made.append(trial)
                print({"ranks": ranks, "warm": warm, **{k: v for k, v in trial.items() if k != "finals"}}, flush=True)
        for warm, made in trials.items():
            numbers = [name for name, value in made[0].items() if isinstance(value, float)]
            figures[f"{ranks} ranks, {warm}"] = {
                "runs": runs,
                "same_bits": sum(trial["same_bits"] for trial in made),
                **{f"{name}_median": round(statistics.median(trial[name] for trial in made), 2) for name in numbers},
                "back_seconds_all": sorted(round(trial["back_seconds"], 2) for trial in made),
            }
    return figures


# --- signals to the launcher ----------------------------------------------------------------------------------------

SIGNALS = {signal.SIGKILL: 137, signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


def reach(phase: str, job: Job, chance: random.Random) -> None:
    """Wait until the job is in this phase."""
    if phase == "start":
        time.sleep(chance.uniform(0.05, 4.0))
    elif phase == "step":
        job.wait_for(lambda: len(job.notes(1)) > chance.randrange(2, 12))
        time.sleep(chance.uniform(0, 0.02))
    elif phase == "save":
        job.wait_for(lambda: bool(job.notes(0, "save")))
        time.sleep(chance.uniform(0, 0.05))
    else:
        job.wait_for(lambda: len(job.notes(1)) > 3)
        os.kill(job.notes(1)[-1][2], signal.SIGKILL)
        time.sleep(chance.uniform(0, 4.0))


def signal_once(signum: signal.Signals, phase: str, out: Path, chance: random.Random) -> dict[str, Any]:
    job = Job("fleetrun", 2, ("--steps", "5000", "--ballast", str(40 * 2**20)), out)
    job.start()
    reach(phase, job, chance)
    sent = time.monotonic()
    job.process.send_signal(signum)
    limit = sent + GONE_SECONDS
    while job.process.poll() is None or job.alive():
        if time.monotonic() > limit:
            break
        time.sleep(0.02)
    left = [" ".join(process.cmdline())[:120] for process in job.alive()]
    gone_seconds = time.monotonic() - sent
    code = job.process.poll()
    job.end(1.0)
    # A shell shows a process that died of signal n as 128 + n; in its first milliseconds Python has no handlers yet.
    right = code is not None and (code if code >= 0 else 128 - code) == SIGNALS[signum]
    return {"gone": not left and code is not None, "right_code": right, "code": code, "left": left, "seconds": gone_seconds}


def campaign_signals(repeats: int, folder: Path, chance: random.Random) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for signum in SIGNALS:
        for phase in ("start", "step", "save", "restart"):
            trials = []
            for number in range(repeats):
                trial = signal_once(signum, phase, folder / f"{signum.name}-{phase}-{number}", chance)
                trials.append(trial)
                if not (trial["gone"] and trial["right_code"]):
                    print(f"FAILED {signum.name} {phase}: {trial}", flush=True)
            figures[f"{signum.name} {phase}"] = {
                "runs": repeats,
                "gone_in_2s": sum(t["gone"] for t in trials),
                "right_code": sum(t["right_code"] for t in trials),
                "slowest_seconds": round(max(t["seconds"] for t in trials), 2),
            }
            print(f"{signum.name} {phase}: {figures[f'{signum.name} {phase}']}", flush=True)
    return figures


# --- stopped ranks --------------------------------------------------------------------------------------------------


def stop_once(out: Path, chance: random.Random) -> dict[str, Any]:
    job = Job("fleetrun", 2, ("--steps", "5000"), out, restarts=0)
    job.start()
    victim = chance.randrange(2)
    job.wait_for(lambda: len(job.notes(victim)) > 3)
    stopped = time.monotonic()
    os.kill(job.notes(victim)[-1][2], signal.SIGSTOP)
    code = job.end(60.0)
    naming = [s - stopped for s, line in job.lines if s > stopped and f"rank {victim}" in line]
    logs = [(out / "log" / f"workerlog.{rank}").read_text() for rank in range(2)]
    return {
        "named_seconds": min(naming) if naming else None,
        "code": code,
        "stacks": all("most recent call first" in log for log in logs),
        "ended_seconds": time.monotonic() - stopped,
    }


def campaign_stops(repeats: int, folder: Path, chance: random.Random) -> dict[str, Any]:
    trials = [stop_once(folder / f"stop-{number}", chance) for number in range(repeats)]
    named = [t["named_seconds"] for t in trials if t["named_seconds"] is not None]
    return {
        "runs": repeats,
        "named": len(named),
        "named_seconds_worst": round(max(named), 2) if named else None,
        "ended_seconds_worst": round(max(t["ended_seconds"] for t in trials), 2),
        "stacks_of_all_ranks": sum(t["stacks"] for t in trials),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="runs with a killed rank")
    parser.add_argument("--torchrun", type=int, default=6, help="the same under torchrun")
    parser.add_argument("--restarts", type=int, default=10, help="timed restarts of each kind, with 2 and with 4 ranks")
    parser.add_argument("--signals", type=int, default=10, help="of each signal in each phase")
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="faults", help="of the file in bench/results; empty: none is written")
    args = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_IGN:  # under nohup, or in the background: launchers would ignore it too
            signal.signal(signum, signal.SIG_DFL)
    chance, figures = random.Random(args.seed), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.kills or args.torchrun:
            figures["kills"] = campaign_kills(args.kills, args.torchrun, folder, chance)
        if args.restarts:
            figures["restarts"] = campaign_restarts(args.restarts, folder, chance)
        if args.stops:
            figures["stops"] = campaign_stops(args.stops, folder, chance)
        if args.signals:
            figures["signals"] = campaign_signals(args.signals, folder, chance)
    if args.name:
        publish(args.name, figures)
    else:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
