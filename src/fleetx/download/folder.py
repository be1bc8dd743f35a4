"""A folder held open by its descriptor. Below it nothing is reached through links, not even one made a moment ago.

Names that others chose (a manifest, an archive): only plain relative ones, which lead nowhere but below the target."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence

from ..errors import DataError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """The target itself may be a link: that is the user's own choice."""
    handle = os.open(path, _FOLDER)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def below(root: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """A folder below another one, component by component."""
    handle = os.dup(root)
    try:
        for depth, part in enumerate(parts, start=1):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=handle)
            try:
                deeper = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
            except NotADirectoryError:
                place = "/".join(parts[:depth])
                raise DataError(f"{place} in the target is a link or a file; nothing is written through it. Remove it.") from None
            os.close(handle)
            handle = deeper
        yield handle
    finally:
        os.close(handle)


def open_to_read(folder: int, name: str) -> int | None:
    """A plain file, which may be linked in from elsewhere; None when there is nothing of the kind."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)  # a pipe would block for ever
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def open_to_write(folder: int, name: str) -> int:
    """A plain file, made if need be; never one that a link leads to."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        handle = os.open(name, flags, 0o666, dir_fd=folder)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    except OSError as error:
        if not _is_in_the_way(folder, name):
            raise error
    raise DataError(f"{name} in the target is a link or not a plain file; nothing is written through it. Remove it.")


def _is_in_the_way(folder: int, name: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def write_whole(folder: int, name: str, text: str) -> None:
    """All of it or, after a kill, what was there before."""
    aside = f"{RESERVED}{uuid.uuid4().hex}"
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=folder)
        raise


def read_whole(folder: int, name: str, limit_bytes: int) -> str | None:
    """None when it is not there, too large or not text: our notes are only ever a saving of work."""
    handle = open_to_read(folder, name)
    if handle is None:
        return None
    with open(handle, "rb") as file:
        data = file.read(limit_bytes + 1)
    with contextlib.suppress(UnicodeDecodeError):
        return data.decode() if len(data) <= limit_bytes else None
    return None


RESERVED = ".fleetx-"
"""How the names of our own notes in a target folder begin."""
MAX_DEPTH = 64
MAX_COMPONENT_BYTES = 250
"""File systems allow 255, and an unfinished file is called NAME.part."""

# A name with a line break or an escape sequence could forge lines of a log or of a file list.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_DRIVE = re.compile(r"[A-Za-z]:")


class BadName(Exception):
    """Why a name cannot be used; a sentence without its subject."""


def parts_of(name: str) -> tuple[str, ...]:
    """The components of a relative name, without the "." ones and empty ones; none at all for "./"."""
    if not name:
        raise BadName("is empty")
    if _CONTROL.search(name):
        raise BadName("contains a control character")
    if "\\" in name:
        raise BadName("contains a backslash; folders are separated by /")
    if name.startswith("/") or _DRIVE.match(name):
        raise BadName("is absolute; only names below the target are allowed")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise BadName("contains ..; only names below the target are allowed")
    if len(parts) > MAX_DEPTH:
        raise BadName(f"is {len(parts)} folders deep; at most {MAX_DEPTH} are allowed")
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise BadName("is not Unicode text") from None
    for part in parts:
        if len(part.encode("utf-8", "surrogateescape")) > MAX_COMPONENT_BYTES:
            raise BadName(f"has a part longer than {MAX_COMPONENT_BYTES} bytes")
        if part.startswith(RESERVED):
            raise BadName(f"begins with {RESERVED}, which is kept for notes of the downloader")
    return parts


def shown(name: str) -> str:
    """For a message: quoted, escaped, and never longer than a line."""
    return repr(name) if len(name) <= 120 else repr(name[:100]) + f"... ({len(name)} characters)"
