"""Signals to the launcher are noted here, and acted on where the workers are watched: nothing is cut short at a random place."""

from __future__ import annotations

import collections
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
WATCHED = (*STOPS, signal.SIGQUIT)


class Signals:
    def __init__(self) -> None:
        self._pending: collections.deque[signal.Signals] = collections.deque()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._pending.append(signal.Signals(signum))

    def take(self) -> list[signal.Signals]:
        """Those that came since the last time, in order."""
        taken = []
        while self._pending:
            taken.append(self._pending.popleft())
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
