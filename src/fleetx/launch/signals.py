"""Record signals to the launcher, which the supervisor's loop handles later: no code is interrupted at a random place."""

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
"""Signals within this time are one request: `timeout` signals its child and then the group, `uv run` repeats a Ctrl-C."""


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
        """Return the requests to stop since the last call, in order. Signals within SAME_REQUEST_SECONDS are one request,
        returned when that time is over, or now if `at_once`."""
        taken = []
        while self._stops and (at_once or time.monotonic() > self._stops[0][0] + SAME_REQUEST_SECONDS):
            came_seconds, signum = self._stops.popleft()
            taken.append(signum)
            while self._stops and self._stops[0][0] <= came_seconds + SAME_REQUEST_SECONDS:
                self._stops.popleft()
        return taken

    def take_stacks(self) -> bool:
        """Return whether the ranks' stacks were requested since the last call."""
        taken, self._wants_stacks = self._wants_stacks, False
        return taken

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record signals inside the block. Ignored signals stay ignored: `nohup fleetrun` must outlive its terminal."""
        before = {signum: signal.getsignal(signum) for signum in WATCHED}
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, self._note)
        # If the parent ignores SIGCHLD, the kernel discards exit codes of children, and every crash would look like a success.
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler if handler is not None else signal.SIG_DFL)


def has_handler(pid: int, signum: signal.Signals) -> bool:
    """Return whether a process has a handler for this signal."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as status:
            masks = [line.split()[1] for line in status if line.startswith("SigCgt:")]
    except OSError:
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (signum - 1) & 1)
