"""A job of several fleetruns that meets faults: each launcher can be killed and started again, its ranks found by their notes.

Each rank of the script appends a line for each step to OUT/notes/RANK:  attempt step pid nanoseconds
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from bench.lib.results import ROOT

MARK = "FLEETX_JOB_MARK"
PORT = 6070
POLL_SECONDS = 0.02


class Place(Protocol):
    """Where a launcher runs: a host of bench/lib/netns.py, or this machine under one of its addresses."""

    @property
    def address(self) -> str: ...

    def command(self, *words: str) -> list[str]: ...

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]: ...


@dataclass(frozen=True)
class Loopback:
    """This machine, under an address of its own."""

    address: str

    def command(self, *words: str) -> list[str]:
        return list(words)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        return dict(inherited)


class Note(NamedTuple):
    attempt: int
    step: int
    pid: int
    seconds: float


@dataclass
class NodesJob:
    """One rank on each place."""

    places: Sequence[Place]
    script: Path
    arguments: Sequence[str]
    out: Path
    flags: Sequence[str] = ()
    port: int = PORT
    first_paths: Sequence[Path] = ()
    """Folders before all others on Python's path."""
    variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Variables of single nodes."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    launchers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        (self.out / "notes").mkdir(parents=True, exist_ok=True)
        for node in range(len(self.places)):
            self.start_node(node)

    def start_node(self, node: int) -> None:
        place, first = self.places[node], self.places[0]
        where = ["--nnodes", str(len(self.places)), "--master", f"{first.address}:{self.port}", "--rank", str(node)]
        where += ["--host", place.address, "--nproc_per_node", "1"]
        command = [sys.executable, "-m", "fleetx.launch", *where, *self.flags, str(self.script), *self.arguments]
        paths = [*map(str, self.first_paths), str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        common = {MARK: self.mark, "FLEETX_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "FLEETX_JOB_SECRET": self.mark}
        environment = {**place.environment(os.environ), **common, "PYTHONPATH": os.pathsep.join(paths)}
        environment.update(self.variables.get(node, {}))
        with (self.out / f"node{node}.log").open("ab") as told:
            self.launchers[node] = subprocess.Popen(
                place.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                cwd=self.out,
            )

    def told(self, node: int) -> str:
        return (self.out / f"node{node}.log").read_text(errors="backslashreplace")

    def signal_node(self, node: int, signum: signal.Signals) -> None:
        self.launchers[node].send_signal(signum)

    def kill_node(self, node: int) -> None:
        """Kill the launcher, as a machine that goes down takes it."""
        self.launchers[node].kill()
        self.launchers[node].wait()

    def signal_rank(self, rank: int, signum: signal.Signals) -> bool:
        """Send a signal to the rank that has noted the last step; return whether it was there."""
        notes = self.notes(rank, last_bytes=200)
        if not notes or not self._is_ours(notes[-1].pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(notes[-1].pid, signum)
            return True
        return False

    def notes(self, rank: int, *, last_bytes: int | None = None) -> list[Note]:
        try:
            with (self.out / "notes" / str(rank)).open("rb") as file:
                if last_bytes is not None:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
                    file.readline()
                fields = [line.split() for line in file.read().decode().splitlines()]
        except OSError:
            return []
        return [Note(int(f[0]), int(f[1]), int(f[2]), int(f[3]) / 1e9) for f in fields if len(f) == 4]

    def step(self) -> int:
        """The step that the slowest rank has noted last."""
        return min((notes[-1].step if (notes := self.notes(r, last_bytes=200)) else 0) for r in range(len(self.places)))

    def codes(self) -> list[int | None]:
        return [self.launchers[node].poll() for node in sorted(self.launchers)]

    def wait_for(self, holds: Callable[[], bool], limit_seconds: float) -> bool:
        """Wait until it holds; False once a launcher has ended with an error, or the time is over."""
        limit = time.monotonic() + limit_seconds
        while not holds():
            if time.monotonic() > limit or any(code not in (None, 0) for code in self.codes()):
                return holds()
            time.sleep(POLL_SECONDS)
        return True

    def wait(self, limit_seconds: float) -> list[int | None]:
        """The launchers' exit codes; None for those that still run at the end of the limit."""
        self.wait_for(lambda: None not in self.codes(), limit_seconds)
        return self.codes()

    def close(self) -> None:
        """Kill what is left of the job."""
        for process in self.launchers.values():
            if process.poll() is None:
                process.kill()
        for found in psutil.process_iter():
            if self._is_ours(found.pid):
                with contextlib.suppress(psutil.Error):
                    found.kill()
        for process in self.launchers.values():
            process.wait()

    def finals(self) -> list[str | None]:
        """The fingerprint that each rank wrote at its end."""
        paths = [self.out / f"final-{rank}.json" for rank in range(len(self.places))]
        return [json.loads(path.read_text())["sha256"] if path.exists() else None for path in paths]

    def _is_ours(self, pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/environ").read_bytes().find(f"{MARK}={self.mark}\0".encode()) >= 0
        except OSError:
            return False
