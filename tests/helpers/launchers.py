"""Real fleetruns for tests, without the seconds that each would take to import torch: one process imports it, and forks.

A launcher started here is a process of its own, in a session of its own, whose children are found by a mark in their
environment. `Launchers` is the pytest side; run as a script, this file is the process that forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PROGRESS = SOURCE / "fleetx" / "dist" / "heartbeat.py"
MARK = "FLEETX_TEST_MARK"
LIMIT_SECONDS = 60.0

USES_PROGRESS = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("progress", {str(PROGRESS)!r})  # fleetx itself would import torch
progress = sys.modules["progress"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(progress)
"""


def wait_until(holds: Callable[[], bool], limit_seconds: float = LIMIT_SECONDS) -> float:
    """How many seconds it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < limit_seconds, f"waited for more than {limit_seconds} s"
        time.sleep(0.01)
    return time.monotonic() - began


def find_marked(mark: str) -> list[int]:
    """Processes with this mark in their environment, but for dead ones."""
    needle = f"\0{MARK}={mark}\0".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if needle in b"\0" + Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
    return found


class Launcher:
    """One fleetrun under way, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        wait_until((folder / "launcher.pid").exists)
        self.pid = int((folder / "launcher.pid").read_text())

    @property
    def console(self) -> str:
        return (self.folder / "launcher.out").read_text()

    @property
    def told(self) -> str:
        """What it said on stderr."""
        return (self.folder / "launcher.err").read_text()

    def log(self, rank: int) -> str:
        return (self.folder / "log" / f"workerlog.{rank}").read_text()

    def send(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def is_running(self) -> bool:
        return not (self.folder / "launcher.code").exists()

    def wait(self, limit_seconds: float = LIMIT_SECONDS) -> int:
        """Its exit code; negative for a signal."""
        wait_until(lambda: not self.is_running(), limit_seconds)
        return int((self.folder / "launcher.code").read_text())

    def left_behind(self) -> list[int]:
        return find_marked(str(self.folder))


class Launchers:
    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        self._forker = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, env=environment)
        self._started: list[Launcher] = []

    def start(self, folder: Path, script: str, *flags: str, **variables: str) -> Launcher:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(script, encoding="utf-8")
        job = {"folder": str(folder), "flags": [*flags, "train.py"], "variables": {MARK: str(folder), **variables}}
        assert self._forker.stdin is not None
        self._forker.stdin.write(json.dumps(job) + "\n")
        self._forker.stdin.flush()
        self._started.append(Launcher(folder))
        return self._started[-1]

    def close(self) -> None:
        """Those of a test that failed may still run."""
        for launcher in self._started:
            if launcher.folder.exists() and launcher.is_running():
                launcher.send(signal.SIGKILL)
        assert self._forker.stdin is not None
        self._forker.stdin.close()
        self._forker.wait(LIMIT_SECONDS)


@contextlib.contextmanager
def launchers() -> Iterator[Launchers]:
    started = Launchers()
    try:
        yield started
    finally:
        started.close()


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def _run_launcher(folder: Path, flags: list[str]) -> None:
    from fleetx.launch.fleetrun import main

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, name in ((1, "launcher.out"), (2, "launcher.err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    _write(folder / "launcher.pid", str(os.getpid()))
    code = 1
    try:
        code = main(flags)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _keep_launcher(job: dict[str, object]) -> None:
    folder = Path(str(job["folder"]))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.update(job["variables"])  # type: ignore[call-overload]
    pid = os.fork()
    if pid == 0:
        _run_launcher(folder, job["flags"])  # type: ignore[arg-type]
    _, status = os.waitpid(pid, 0)
    _write(folder / "launcher.code", str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def serve() -> None:
    from fleetx.launch import supervise  # noqa: F401  # the import that every launcher would otherwise make

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that keep a launcher end by themselves
    for line in sys.stdin:
        if os.fork() == 0:
            _keep_launcher(json.loads(line))


if __name__ == "__main__":
    serve()
