"""An archive into the folder it lies in: first into a fresh folder aside, and moved in once every member was fine.

A kill before the move leaves only the folder aside, which the next call removes. A kill during the move leaves whole files,
and no record that the archive is unpacked: the next call does it again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator

from ..errors import DataError
from .complete import KEPT_NAMES, Unpacked
from .folder import below, open_to_read
from .manifest import Entry
from .once_per_node import UNPACKING
from .untar import untar
from .unzip import unzip
from .writer import BadMember, Limits, Writer

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(
    root: int, root_path: str, entry: Entry, limits: Limits, kept: Collection[str], received: Callable[[int], None]
) -> Unpacked:
    """`kept` are the paths of the manifest: no archive may replace one of them. `received` is told the place in the archive."""
    with below(root, entry.parts[:-1]) as folder, _fresh_folder(root) as name:
        archive = open_to_read(folder, entry.parts[-1])
        if archive is None:
            raise DataError(f"{entry.path} has vanished from the target while it was to be unpacked.")
        try:
            with open(archive, "rb") as file:
                writer = Writer(f"{root_path}/{name}", limits, kept, entry.parts[:-1], lambda: received(file.tell()))
                max_stream_bytes = limits.stream_bytes(os.fstat(archive).st_size)
                if entry.archive_kind == "zip":
                    unzip(file, max_stream_bytes, writer)
                else:
                    untar(file, entry.archive_kind or "", max_stream_bytes, writer)
        except BadMember as error:
            text = str(error)
            raise DataError(f"{entry.path}{text if text.startswith(':') else ' ' + text}. Nothing of it was unpacked.") from None
        with below(root, (name,)) as aside:
            names = sorted(os.listdir(aside))[:KEPT_NAMES]
            _check_way(aside, folder, entry.path, entry.parts[:-1])
            _move_in(aside, folder)
        os.sync()  # one for all: a million single fsyncs take hours
        return Unpacked(writer.files, writer.bytes, names)


@contextlib.contextmanager
def _fresh_folder(root: int) -> Iterator[str]:
    name = f"{UNPACKING}{uuid.uuid4().hex}"
    os.mkdir(name, 0o700, dir_fd=root)
    try:
        yield name
    finally:
        shutil.rmtree(name, dir_fd=root)


def _check_way(source: int, target: int, archive: str, place: tuple[str, ...]) -> None:
    """What cannot be moved in is found before the first is moved."""
    for name in os.listdir(source):
        try:
            there = os.stat(name, dir_fd=target, follow_symlinks=False).st_mode
        except FileNotFoundError:
            continue
        mine = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mine) != stat.S_ISDIR(there):
            kind = "a folder, but a file or link" if stat.S_ISDIR(there) else "not a folder, but one"
            where = "/".join((*place, name))
            raise DataError(
                f"{where} in the target is {kind} in {archive}. Nothing of it was unpacked; remove what is in the way."
            )
        if stat.S_ISDIR(mine):
            with _deeper(source, name) as inner, _deeper(target, name) as outer:
                _check_way(inner, outer, archive, (*place, name))


def _move_in(source: int, target: int) -> None:
    """Folders that are there already are joined; files are replaced. rename follows no link, and neither do we."""
    for name in os.listdir(source):
        try:
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            with _deeper(source, name) as inner, _deeper(target, name) as outer:
                _move_in(inner, outer)


@contextlib.contextmanager
def _deeper(folder: int, name: str) -> Iterator[int]:
    handle = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)
