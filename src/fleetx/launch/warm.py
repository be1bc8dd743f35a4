"""Starting ranks without importing torch again: the launcher's side of the process that forks them (forker.py).

The process is started when all ranks of this node have noted what they import, and train: it takes no core from them while they
start. It is ready when it has imported the same. A restart before that, or after it was killed, executes Python again, as the
first start does: that is slower, and never an error.

A rank forked there becomes a child of the launcher, which for that moment takes the orphans among its descendants (a subreaper).
Exit codes told over the socket would be lost with the process that tells them, and a pidfd tells no exit code to a stranger.

Memory: the process holds what the imports take, about 230 MiB, of which a forked rank shares the half that it does not write to.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dist.heartbeat import PROGRESS_FILE
from ..dist.notes import NOTE_KEY
from .worker import FAILURE_FILE, FORKER, IMPORTS_FILE

PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
FORK_SECONDS = 5.0
"""How long the answer to a request may take: forking takes milliseconds."""
SETTLE_SECONDS = 30.0
"""So long after it began to import torch, a script that tells no steps is taken to train."""
KILL_SECONDS = 2.0
REAP_SECONDS = 0.002
OWN = frozenset((PROGRESS_FILE, FAILURE_FILE, IMPORTS_FILE, NOTE_KEY))
"""Variables of one attempt, which what is imported must not see."""
READ_LATER = frozenset(("CUDA_VISIBLE_DEVICES",))
"""Variables that scripts set for each rank before they import torch, and that are read when the GPU is first used."""


@dataclass(frozen=True)
class Imports:
    """What the ranks of a node import, and what the script had changed by then."""

    names: tuple[str, ...]
    path: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)


def agree_on_imports(notes: Sequence[Mapping[str, Any] | None]) -> Imports | None:
    """Return what all ranks note alike; None while one has not noted, or if their search paths or variables differ."""
    if not notes or not all(notes):
        return None
    found = [_imports_of(note) for note in notes if note]
    first = found[0]
    if any((other.path, other.environment) != (first.path, first.environment) for other in found):
        return None
    names = [name for name in first.names if all(name in other.names for other in found)]
    return Imports(tuple(names), first.path, first.environment)


def _imports_of(note: Mapping[str, Any]) -> Imports:
    environment = {name: value for name, value in note["environment"].items() if name not in READ_LATER}
    return Imports(tuple(note["imports"]), tuple(note["path"]), environment)


def shared_environment(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the variables that all ranks of this node have in common."""
    first, *others = environments
    return {name: value for name, value in first.items() if name not in OWN and all(other.get(name) == value for other in others)}


class ForkedRank:
    """A rank that was forked, as `subprocess.Popen` shows an executed one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        limit = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout or 0.0)
            time.sleep(REAP_SECONDS)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:  # not collected, so that the id is its own
            os.kill(self.pid, signum)

    def end(self) -> None:
        """Kill it and what it has started in its session."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send_signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(KILL_SECONDS)


@contextlib.contextmanager
def taking_orphans() -> Iterator[None]:
    """Make this process the parent of orphans among its descendants, inside the block."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


class Forker:
    """The process from which the ranks of this node are forked; it may not have been started, or have ended."""

    def __init__(self, command: Sequence[str], debug: Callable[[str], None], *, is_wanted: bool) -> None:
        """Prepare it. `command`: that of a rank; `is_wanted`: False leaves all starts to `exec`."""
        self.is_wanted = is_wanted
        self._command, self._debug = command, debug
        self._environments: Mapping[int, Mapping[str, str]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._first_answer: dict[str, Any] | None = None
        self._is_ready = self._is_considered = False
        self._noted_seconds = math.inf

    @property
    def pids(self) -> frozenset[int]:
        """Its process id, to be spared when ranks are killed; empty if there is none."""
        return frozenset(() if self._process is None else (self._process.pid,))

    def begin_attempt(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Take the whole environment of each local rank of the attempt that starts now."""
        self._environments = environments
        self._noted_seconds, self._is_considered = math.inf, False

    def consider(self, note_of: Callable[[int], dict[str, Any] | None], *, is_training: bool) -> None:
        """Start it, once in an attempt, when all ranks have noted what they import and train."""
        if self._process is not None and not self._is_ready and self.is_ready():
            self._debug(f"a restart would fork its ranks from process {self._process.pid}")
        if not self.is_wanted or self._is_considered or self._process is not None:
            return
        notes = [note_of(local_rank) for local_rank in self._environments]
        if not all(notes):
            return
        self._noted_seconds = min(self._noted_seconds, time.monotonic())
        if not is_training and time.monotonic() < self._noted_seconds + SETTLE_SECONDS:
            return
        self._is_considered = True
        imports = agree_on_imports(notes)
        if imports is None:
            return self._debug("a restart will import torch again: the ranks differ in what was set before they imported it")
        self.start(imports, shared_environment(self._environments.values()))

    def start(self, imports: Imports, environment: Mapping[str, str]) -> None:
        """Start it. It imports while the ranks train; `environment`: what the ranks' have in common."""
        self._socket, its_end = socket.socketpair()
        variables = {**environment, FORKER: str(its_end.fileno())}
        try:
            with its_end:
                self._process = subprocess.Popen(
                    self._command, env=variables, pass_fds=[its_end.fileno()], start_new_session=True
                )
        except OSError as error:
            return self._give_up(f"it could not be started: {error}")
        self._tell({"imports": imports.names, "path": imports.path, "environment": imports.environment})

    def is_ready(self) -> bool:
        """Return whether ranks can be forked now."""
        if self._process is None or self._socket is None:
            return False
        if not self._is_ready:
            self._first_answer = self._first_answer or self._answer(0.0)
            self._is_ready = bool(self._first_answer and self._first_answer.get("ready"))
        return self._is_ready and self._process.poll() is None

    def fork(self, local_ranks: Iterable[int] | None = None) -> dict[int, ForkedRank] | None:
        """Start these ranks, by default all. None: it is not ready, or did not answer, and no such rank runs."""
        if not self.is_wanted:
            return None
        if not self.is_ready():
            self._give_up(self._why_not())
            return None
        environments = {rank: self._environments[rank] for rank in local_ranks or self._environments}
        with taking_orphans():
            self._tell({"environments": list(environments.values())})
            answer = self._answer(FORK_SECONDS)
        if answer is None:
            self._kill()
            answer = self._answer(0.0) or {}  # told in the last moment: ranks run only after their ids are told
        forked = [ForkedRank(pid) for pid in answer.get("pids", []) if is_own_child(pid)]
        if len(forked) < len(environments) or self._process is None:
            self._give_up("it gave no ranks")
            for rank in forked:
                rank.end()
            return None
        self._debug("the ranks are forked from the warm process, without importing torch again")
        return dict(zip(environments, forked, strict=True))

    def close(self) -> None:
        """End it."""
        self._kill()
        if self._socket is not None:
            self._socket.close()
        self._socket, self._first_answer, self._is_ready = None, None, False

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)
        self._process = None

    def _why_not(self) -> str:
        if self._process is None:
            return "there is none"
        refused = (self._first_answer or {}).get("refused")
        return str(refused) if refused else "it has ended" if self._process.poll() is not None else "it is not ready"

    def _give_up(self, why: str) -> None:
        """End it: what it may still import would only delay ranks that import the same."""
        self.close()
        self._debug(f"the ranks import torch again, without the warm process: {why}")

    def _tell(self, request: Mapping[str, object]) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):  # it has ended: there will be no answer
            self._socket.settimeout(FORK_SECONDS)
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def _answer(self, limit_seconds: float) -> dict[str, Any] | None:
        """Return its next line; None if there is none within the limit."""
        assert self._socket is not None
        line, limit = b"", time.monotonic() + limit_seconds
        while not line.endswith(b"\n"):
            patience = max(0.0, limit - time.monotonic()) if not line else FORK_SECONDS
            if not select.select([self._socket], [], [], patience)[0]:
                return None
            try:
                more = self._socket.recv(1 << 16)
            except OSError:
                return None
            if not more:
                return None
            line += more
        answer: dict[str, Any] = json.loads(line)
        return answer


def is_own_child(pid: int) -> bool:
    """Return whether the kernel gave this process to the launcher."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
