"""One process of a node at a time. A lock of the kernel: whoever dies holding it lets it go."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ...dist.file_lock import LocksMissingError, lock_aloud
from ...errors import DataError, warn_user

_FIRST_WORD_S, _NEXT_WORD_S = 2.0, 60.0


@contextlib.contextmanager
def node_lock(path: Path, *, waiting_for: str) -> Iterator[None]:
    """Hold the lock; say on stderr what is waited for when that takes more than a moment."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:  # made by another user, perhaps, or a link that leads who knows where
        raise DataError(f"{path} cannot be opened to lock it ({error.strerror}). Pass another cache_dir=FOLDER.") from None
    try:
        _acquire(handle, path, waiting_for)
        yield
    finally:
        os.close(handle)  # lets go


def _acquire(handle: int, path: Path, waiting_for: str) -> None:
    def say(waited_s: float) -> None:
        print(f"fleetx: waiting for {waiting_for}, prepared by another process ({waited_s:.0f} s so far).", file=sys.stderr)

    try:
        lock_aloud(handle, say, first_word_s=_FIRST_WORD_S, next_word_s=_NEXT_WORD_S)
    except LocksMissingError as error:
        # Without locks several may build the same: slower, and still right, since each renames a whole folder.
        warn_user(f"{path.parent} is on a file system without locks ({error.strerror}).")
