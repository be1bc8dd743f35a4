"""A bad file is met by one rank alone. It tells the others, who raise the same error instead of waiting for it.

No collective: a loader may be read by one rank alone, to look at a batch or to evaluate. The rank that fails leaves its
sentence in the job's store and raises; a loader of another rank looks there now and then, and a rank that is already waiting in
a collective finds the sentence when the connection breaks (`comm.Pending.wait`).
"""

from __future__ import annotations

import time
from typing import Never

from ..errors import DataError

LOOK_EVERY_SECONDS = 0.5


def fail_everywhere(text: str) -> Never:
    from ..dist import world  # here, not above: data stands below fleet

    here = world.current().comm
    if here.size > 1:
        text = f"{text} (Worker {here.rank} met it.)"
    here.post_error(text)
    raise DataError(text)


class Watch:
    """Looks for another rank's trouble, at most twice a second: the store is one process, and jobs have many ranks."""

    def __init__(self) -> None:
        self._due = 0.0
        self._before = _word()  # trouble that a script has got over is not that of a loader made afterwards

    def look(self, *, now: bool = False) -> None:
        seconds = time.monotonic()
        if not now and seconds < self._due:
            return
        self._due = seconds + LOOK_EVERY_SECONDS
        word = _word()
        if word is not None and word != self._before:
            raise DataError(word)


def _word() -> str | None:
    from ..dist import world

    return world.current().comm.posted_error() if world.is_open() else None
