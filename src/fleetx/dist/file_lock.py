"""A kernel lock on an open file, with messages while waiting. The kernel releases it when the holding process dies."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Callable

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_POLL_S = 0.05


class LocksMissingError(OSError):
    """Raised when the file system supports no locks."""


def lock_aloud(handle: int, say: Callable[[float], None], *, first_word_s: float, next_word_s: float) -> None:
    """Take the exclusive lock; call `say` with the seconds waited, first after `first_word_s`, then every `next_word_s`.

    It polls instead of blocking in the kernel, so that a long wait can be reported."""
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
