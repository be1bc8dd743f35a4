"""Signals to the launcher are noted here, and acted on where the workers are watched: nothing is cut short at a random place."""

from __future__ import annotations

import collections
import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
WATCHED = (*STOPS, signal.SIGQUIT)
SAME_REQUEST_SECONDS = 0.05
"""`timeout` signals its child and then the child's group, `uv run` passes on the Ctrl-C that the terminal sent as well."""


class Signals:
    def __init__(self) -> None:
        self._stops: collections.deque[tuple[float, signal.Signals]] = collections.deque()  # when each came
        self._wants_stacks = False

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGQUIT:
            self._wants_stacks = True
        else:
            self._stops.append((time.monotonic(), signal.Signals(signum)))

    def take_stops(self, *, at_once: bool) -> list[signal.Signals]:
        """Requests since the last time, in order; those that came within a moment are one, known when the moment is over, or
        at once."""
        taken = []
        while self._stops and (at_once or time.monotonic() > self._stops[0][0] + SAME_REQUEST_SECONDS):
            came_seconds, signum = self._stops.popleft()
            taken.append(signum)
            while self._stops and self._stops[0][0] <= came_seconds + SAME_REQUEST_SECONDS:
                self._stops.popleft()
        return taken

    def take_stacks(self) -> bool:
        """Whether the ranks' stacks were asked for since the last time."""
        taken, self._wants_stacks = self._wants_stacks, False
        return taken

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A signal that is ignored stays so: `nohup fleetrun` is to outlive its terminal."""
        before = {signum: signal.getsignal(signum) for signum in WATCHED}
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, self._note)
        # Where a parent ignores SIGCHLD, the kernel forgets how children ended and every crash would look like a success.
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler if handler is not None else signal.SIG_DFL)


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether a process has a handler for this signal."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as status:
            masks = [line.split()[1] for line in status if line.startswith("SigCgt:")]
    except OSError:
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (signum - 1) & 1)
