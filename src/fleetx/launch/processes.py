"""Worker processes: their state, signals to them, and killing them with everything they started."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import psutil

from ..errors import LaunchError
from .guardian import GOODBYE, RUN_ID, kill_run
from .logs import STACK_HEADING
from .signals import has_handler

GUARDIAN = Path(__file__).with_name("guardian.py")
KILL_SECONDS = 15.0
"""Limit of waiting for killed processes: the kernel first frees their GPU and pinned memory."""
STACK_SECONDS = 1.0
STACK_POLL_SECONDS = 0.02


class Process(Protocol):
    """A rank's process: executed (`subprocess.Popen`) or forked (warm.py)."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, signum: int, /) -> None: ...


class Workers:
    """The processes of one attempt by local rank. Each is the leader of its own session."""

    def __init__(self, processes: Mapping[int, Process], run_id: str) -> None:
        self._processes, self._run_id = processes, run_id

    def exits(self) -> dict[int, int | None]:
        return {rank: process.poll() for rank, process in self._processes.items()}

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def status(self, rank: int) -> str:
        """Return the state of the process, as psutil names it."""
        try:
            return str(psutil.Process(self.pid(rank)).status())
        except psutil.Error:
            return str(psutil.STATUS_DEAD)

    def running(self) -> list[int]:
        return [rank for rank, code in self.exits().items() if code is None]

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the workers only: they end their own children, and a data loader must not die before its rank."""
        for rank in self.running():
            self._processes[rank].send_signal(signum)

    def listen(self, signum: signal.Signals) -> bool:
        """Return whether all workers that run have a handler for this signal."""
        return all(has_handler(self.pid(rank), signum) for rank in self.running())

    def interrupt(self) -> None:
        """Pass on Ctrl-C. A worker that is not yet in worker.py gets SIGTERM, since it would print a traceback on the console."""
        for rank in self.running():
            has_begun = has_handler(self.pid(rank), signal.SIGQUIT)
            self._processes[rank].send_signal(signal.SIGINT if has_begun else signal.SIGTERM)

    def write_stacks(self, logs: Mapping[int, Path], *, wake: bool) -> None:
        """Make each rank write its threads' stacks into its log, and wait up to a second for them."""
        able = [rank for rank in self.running() if has_handler(self.pid(rank), signal.SIGQUIT)]  # the signal would kill others
        sizes = {rank: logs[rank].stat().st_size for rank in able if logs[rank].exists()}
        for rank in able:
            self._processes[rank].send_signal(signal.SIGQUIT)
            if wake:  # a stopped process handles signals only when continued
                self._processes[rank].send_signal(signal.SIGCONT)
        limit = time.monotonic() + STACK_SECONDS
        while sizes and time.monotonic() < limit:
            time.sleep(STACK_POLL_SECONDS)
            sizes = {rank: size for rank, size in sizes.items() if not _has_stack(logs[rank], size)}

    def kill(self, spared: Collection[int] = ()) -> bool:
        """Kill the workers and all that they started; return False if a process cannot be killed (it sleeps in the kernel).

        `spared`: processes of the run that are not the workers'."""
        pids = [process.pid for process in self._processes.values()]
        for rank in self.running():  # not collected yet, so that the process group is theirs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid(rank), signal.SIGKILL)
        limit = time.monotonic() + KILL_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
        return kill_run(self._run_id, pids, limit_seconds=max(1.0, limit - time.monotonic()), spared=spared)


def _has_stack(log: Path, size_before: int) -> bool:
    """Return whether the main thread's stack, written last and frame by frame, is complete: nothing was written for a moment."""
    with log.open("rb") as file:
        file.seek(size_before)
        return STACK_HEADING.encode() in file.read() and time.time() - log.stat().st_mtime > STACK_POLL_SECONDS


class Guardian:
    """The guardian process, which cleans up if this process is killed."""

    def __init__(self, run_id: str, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != RUN_ID}  # an outer run would kill it
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-E", str(GUARDIAN), run_id, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=environment,
        )

    def announce(self, pids: Iterable[int]) -> None:
        self._send("".join(f"{pid}\n" for pid in pids).encode())

    def dismiss(self) -> None:
        self._send(GOODBYE)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, lines: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: the run continues without it
            self._process.stdin.write(lines)
            self._process.stdin.flush()


@contextlib.contextmanager
def guarded(run_id: str) -> Iterator[tuple[Path, Guardian]]:
    """Make a folder for the run, in memory if possible, and a guardian that is started before the folder exists."""
    folder = Path(_memory_folder() or tempfile.gettempdir()) / f"fleetrun_{secrets.token_hex(8)}"
    try:
        guardian = Guardian(run_id, folder)
    except OSError as error:
        raise LaunchError(f"no further process can be started here: {error}.") from error
    try:
        _make_folder(folder)
        yield folder, guardian
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        guardian.dismiss()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise LaunchError(f"the run needs a small folder, which cannot be made: {error}. Set TMPDIR to another place.") from error


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
