"""A lock of the kernel on an open file, waited for aloud. Whoever dies holding it lets it go."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Callable

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_POLL_S = 0.05


class LocksMissingError(OSError):
    """The file system has no locks."""


def lock_aloud(handle: int, say: Callable[[float], None], *, first_word_s: float, next_word_s: float) -> None:
    """Hold it. Asks again and again instead of sleeping in the kernel: a wait must be able to say what it waits for."""
    began = time.monotonic()
    next_word = began + first_word_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
        except OSError as error:
            if error.errno in NO_LOCKS:
                raise LocksMissingError(error.errno, error.strerror) from None
            raise
        if now >= next_word:
            say(now - began)
            next_word = now + next_word_s
        time.sleep(_POLL_S)
