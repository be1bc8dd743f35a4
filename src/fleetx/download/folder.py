"""Places below the target folder: which names may be used, and how they are reached without following a link.

Manifests and archives are made by others: only plain relative names are accepted. Folders are held open by descriptor, so
that not even a link made a moment ago leads elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence

from ..errors import DataError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
RESERVED = ".fleetx-"
"""Prefix of the files that the downloader itself keeps in the target."""
MAX_DEPTH = 64
MAX_COMPONENT_BYTES = 250
"""Longest name in bytes: file systems allow 255, and an unfinished file is called NAME.part."""

# A name with a line break or an escape sequence could forge lines of a log or of a file list.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_DRIVE = re.compile(r"[A-Za-z]:")


class BadName(Exception):
    """Raised for a name that cannot be used; the text is a sentence without its subject."""


def parts_of(name: str) -> tuple[str, ...]:
    """Split a relative name into its components, without "." and empty ones; "./" has none."""
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
    """Quote and escape a name for a message, and cut it to a line."""
    return repr(name) if len(name) <= 120 else repr(name[:100]) + f"... ({len(name)} characters)"


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """Open the target folder. It may be a link itself: that is the choice of the user."""
    handle = os.open(path, _FOLDER)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def below(root: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Open a folder below another one, component by component, following no link."""
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
    """Open a plain file, which may be reached through a link; None if there is none."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)  # open() of a pipe would block
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def open_to_write(folder: int, name: str) -> int:
    """Open a plain file, created if it is missing; never through a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        handle = os.open(name, flags, 0o666, dir_fd=folder)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    except OSError as error:
        if not _is_no_plain_file(folder, name):
            raise error
    raise DataError(f"{name} in the target is a link or not a plain file; nothing is written through it. Remove it.")


def _is_no_plain_file(folder: int, name: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def write_whole(folder: int, name: str, text: str) -> None:
    """Replace a text file in one step: a kill leaves the old content."""
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
    """Read a text file; None if it is missing, too large or not text, since the notes read so only save work."""
    handle = open_to_read(folder, name)
    if handle is None:
        return None
    with open(handle, "rb") as file:
        data = file.read(limit_bytes + 1)
    with contextlib.suppress(UnicodeDecodeError):
        return data.decode() if len(data) <= limit_bytes else None
    return None
