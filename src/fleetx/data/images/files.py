"""The bytes of listed images, from a folder or from a `.tar`, by sample number.

Links in a folder are followed, also out of it: datasets made of links are common, and the folder is the user's own. What they
lead to must be a regular file. The list itself can only name what lies below the folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ...errors import DataError
from .image_list import MAX_LIST_BYTES, ImageList, quoted
from .tar_file import Archive, Member

MAX_FILE_BYTES = 64 * 2**20
_LOOKED_AT = 100


class ImageFiles(Protocol):
    def read(self, index: int) -> bytes:
        """The file of sample `index`; a `DataError` with the reason alone where it cannot be read."""


def read_regular_file(path: bytes | str, max_bytes: int) -> bytes:
    """One open, one read, one close. FIFOs and devices are refused, never waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DataError("not a regular file")
            require_size(status.st_size, max_bytes)
            data = os.read(descriptor, status.st_size)
            while len(data) < status.st_size and (more := os.read(descriptor, status.st_size - len(data))):
                data += more
            return data
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(error.strerror or str(error)) from None


def require_size(size: int, max_bytes: int) -> None:
    if size == 0:
        raise DataError("the file is empty (0 bytes)")
    if size > max_bytes:
        raise DataError(f"the file has {size} bytes; allowed are {max_bytes}")


class FolderFiles:
    """Images below a folder."""

    def __init__(self, entries: ImageList, folder: bytes, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._entries, self._prefix, self._max_file_bytes = entries, os.path.join(folder, b""), max_file_bytes

    def read(self, index: int) -> bytes:
        return read_regular_file(self._prefix + self._entries.path(index), self._max_file_bytes)


class TarFiles:
    """Images in an archive. Only where each listed one lies is kept: two arrays that forked readers share."""

    def __init__(self, entries: ImageList, archive: Archive, folder: bytes, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._bytes, self._max_file_bytes = archive.bytes, max_file_bytes
        self._refused: dict[int, str] = {}
        self._offsets, self._sizes = np.zeros((2, len(entries)), dtype=np.int64)
        absent = Member(0, 0, f"{archive.path} has no such member")
        for index in range(len(entries)):
            member = archive.members.get(folder + entries.path(index), absent)
            self._offsets[index], self._sizes[index] = member.offset, member.size
            if member.refused:
                self._refused[index] = member.refused

    def read(self, index: int) -> bytes:
        if index in self._refused:
            raise DataError(self._refused[index])
        size = int(self._sizes[index])
        require_size(size, self._max_file_bytes)
        return self._bytes.read(Member(int(self._offsets[index]), size))


def read_list_file(path: str) -> bytes:
    """The bytes of a list on disk."""
    try:
        return read_regular_file(path, MAX_LIST_BYTES)
    except DataError as error:
        raise DataError(f"{path}: {error}. Expected a list with one line `relative/path label` for each image") from None


def open_folder(entries: ImageList, folder: str, split: str) -> FolderFiles:
    """Images relative to `folder`, or (as Fleet has them) to `folder/SPLIT`: wherever the first listed ones are."""
    places = [os.path.join(os.fsencode(folder), b""), os.path.join(os.fsencode(folder), os.fsencode(split), b"")]
    return FolderFiles(entries, _choose(entries, places, os.path.lexists, shown=""))


def open_tar(entries: ImageList, archive: Archive, folder: bytes, split: str) -> TarFiles:
    """The same in an archive, where `folder` is empty or ends with a slash."""
    places = [folder, folder + os.fsencode(split) + b"/"]
    return TarFiles(entries, archive, _choose(entries, places, archive.members.__contains__, shown=f"{archive.path}: "))


def _choose(entries: ImageList, places: list[bytes], exists: Callable[[bytes], bool], *, shown: str) -> bytes:
    for index in range(min(len(entries), _LOOKED_AT)):
        path = entries.path(index)
        for place in places:
            if exists(place + path):
                return place
    tried = " nor ".join(quoted(place + entries.path(0), limit=400) for place in places)
    raise DataError(f"{entries.place(0)}: there is neither {shown}{tried}; paths are relative to one of these two folders")
