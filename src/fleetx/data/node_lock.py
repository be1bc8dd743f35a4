"""One process of a node at a time. A lock of the kernel: whoever dies holding it lets it go."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..errors import FleetWarning

_POLL_S = 0.05
_FIRST_WORD_S, _NEXT_WORD_S = 2.0, 60.0


@contextlib.contextmanager
def node_lock(path: Path, *, waiting_for: str) -> Iterator[None]:
    """Hold the lock; say on stderr what is waited for when that takes more than a moment."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _acquire(handle, path, waiting_for)
        yield
    finally:
        os.close(handle)  # lets go


def _acquire(handle: int, path: Path, waiting_for: str) -> None:
    start, next_word = time.monotonic(), _FIRST_WORD_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - start
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # Without locks several may build the same: slower, and still right, since each renames a whole folder.
            warnings.warn(f"{path.parent} is on a file system without locks ({error.strerror}).", FleetWarning, stacklevel=4)
            return
        if waited >= next_word:
            print(f"fleetx: waiting for {waiting_for}, prepared by another process ({waited:.0f} s so far).", file=sys.stderr)
            next_word = waited + _NEXT_WORD_S
        time.sleep(_POLL_S)
