"""Write files of this user into folders that other users may be able to write to: links of theirs lead nowhere.

A log or a record has a name that others can guess. A user who may write to the folder could put a link there, to a file of this
user that would then be emptied. So links are not followed, unfinished files have random names, and a folder that belongs to
another user is refused before a run starts. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PRIVATE_MODE = 0o640
"""Permissions of what may hold a secret, before the umask: logs hold what scripts print."""
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last: a pipe in its place must not block


def open_own(path: Path, flags: int, *, mode: int = PRIVATE_MODE) -> int:
    """Open a plain file; OSError if it is a link, a pipe or a device."""
    handle = os.open(path, flags | _SAFE, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return handle


def create_own(path: Path, *, mode: int = PRIVATE_MODE) -> None:
    """Put an empty new file in the place of what is there; a link is removed, and what it leads to stays as it is."""
    path.unlink(missing_ok=True)
    os.close(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=mode))


def open_to_append(path: Path) -> IO[bytes]:
    """Open for unbuffered appending and reading; the position is at the end."""
    file = open(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b", buffering=0)
    file.seek(0, os.SEEK_END)
    return file


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = PRIVATE_MODE) -> Iterator[IO[bytes]]:
    """Open a file under a random name beside its own, and rename it at the end: a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(handle, "wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def replace_file(path: Path, data: bytes, *, mode: int = PRIVATE_MODE) -> None:
    with replacing(path, mode=mode) as file:
        file.write(data)


def sync_folder(path: Path) -> None:
    """Make the folder's file names durable: fsync of a file does not cover its directory entry."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_own_folder(folder: Path) -> None:
    """Raise OSError unless files can be made in the folder, and it is not another user's.

    Its owner is compared with that of a new file, since some shared file systems rename users. Folders of root (/tmp) pass, and
    root may write into those of others: in a container they are usually the host's."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        mine, owner = os.fstat(probe.fileno()).st_uid, os.stat(folder).st_uid
    if os.geteuid() != 0 and owner not in (0, mine):
        raise OSError(errno.EPERM, "it belongs to another user, who could replace every file in it", str(folder))
