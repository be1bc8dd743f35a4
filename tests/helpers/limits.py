"""A limit for what must end: generous, so that a busy machine keeps it, and by its name when it is passed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """End the block with an error if it takes longer, also where it would hang. For the main thread."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{what}: not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
