"""Raise one rank's data error on all ranks, instead of letting the others wait for the rank that failed.

Without a collective: a loader may be read by one rank alone, to look at a batch or to evaluate. The rank that fails posts its
error in the job's store and raises it. Loaders of other ranks check the store now and then; a rank that is already waiting in a
collective finds the error when the connection breaks (`comm.Pending.wait`).
"""

from __future__ import annotations

import time
from typing import Never

from ..errors import DataError

CHECK_EVERY_SECONDS = 0.5


def fail_everywhere(text: str) -> Never:
    """Post the error for the other ranks, then raise it here."""
    from ..dist import world  # here, not above: data stands below fleet

    here = world.current().comm
    if here.size > 1:
        text = f"{text} (Worker {here.rank} met it.)"
    here.post_error(text)
    raise DataError(text)


class RemoteErrorWatch:
    """Check for an error of another rank, at most twice a second: one process serves the store for all ranks."""

    def __init__(self) -> None:
        self._due = 0.0
        self._before = _posted_error()  # an error that the script has caught already must not stop a new loader

    def check(self, *, now: bool = False) -> None:
        seconds = time.monotonic()
        if not now and seconds < self._due:
            return
        self._due = seconds + CHECK_EVERY_SECONDS
        error = _posted_error()
        if error is not None and error != self._before:
            raise DataError(error)


def _posted_error() -> str | None:
    from ..dist import world

    return world.current().comm.posted_error() if world.is_open() else None
