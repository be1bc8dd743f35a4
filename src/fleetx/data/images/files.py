"""Read the bytes of listed images by sample number, from a folder or from a `.tar`.

Links in a folder are followed, also out of it: datasets made of links are common, and the folder is the user's own. Their
target must be a regular file. The list itself can only name files below the folder.
"""

from __future__ import annotations

import os
import posixpath
import stat
import tarfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Protocol, cast

import numpy as np

from ...errors import DataError
from .image_list import MAX_LIST_BYTES, ImageList, quoted

# --- Archives -----------------------------------------------------------------------------------------------------------
# Files inside an uncompressed `.tar` are read in place: headers are indexed once, then each read is one `pread` at an offset.
# `pread` does not use the file position, so forked readers share one descriptor without a lock. Nothing is ever unpacked.
# An archive is not trusted: only plain files are read; of two members with one name the last counts, as when unpacking.

_PACKED = {
    b"\x1f\x8b": "gunzip -k",
    b"BZh": "bunzip2 -k",
    b"\xfd7zXZ\x00": "unxz -k",
    b"\x28\xb5\x2f\xfd": "unzstd",
}
_MAX_HEADER_BYTES = 2**20  # all headers of one member: tarfile takes long names and maps of holes into memory
_MAX_GLOBAL_KEYS = 100  # tarfile copies them for every member: with a million that takes days
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Member:
    """Position of a member's bytes; `refused` says why it must not be read, or is empty."""

    offset: int
    size: int
    refused: str = ""


class Archive:
    """Index an open archive by name, each without a leading `./`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes = ArchiveBytes(path)
        self.members = _index(self.bytes)

    def read(self, name: bytes) -> bytes:
        """Read a member that is an image list; a `DataError` names the archive and the member."""
        member = self.members.get(name, Member(0, 0, "no such member"))
        try:
            if member.size > MAX_LIST_BYTES:
                raise DataError(f"{member.size} bytes, and a list may have {MAX_LIST_BYTES}")
            return self.bytes.read(member)
        except DataError as error:
            raise DataError(f"{self.path}: {quoted(name)}: {error}") from None


class ArchiveBytes:
    """The open archive file without its index, which is large; readers keep only this."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO would otherwise wait for ever for a writer.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; expected a folder or an uncompressed .tar") from None
        weakref.finalize(self, os.close, self.descriptor)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file; expected a folder or an uncompressed .tar")
        self.size = status.st_size

    def __reduce__(self) -> tuple[type[ArchiveBytes], tuple[str]]:
        """Reopen the file in a copy: the descriptor's number may mean another file there, or once the original is closed."""
        return ArchiveBytes, (self.path,)

    def read(self, member: Member) -> bytes:
        """Read a member's bytes; a `DataError` holds the reason alone."""
        if member.refused:
            raise DataError(member.refused)
        data = b""
        while len(data) < member.size:
            try:
                part = os.pread(self.descriptor, member.size - len(data), member.offset + len(data))
            except OSError as error:
                raise DataError(f"{self.path}: {error.strerror}") from None
            if not part:
                raise DataError(f"{self.path} now ends in the middle of this member")
            data = data + part if data else part
        return data


def _index(file: ArchiveBytes) -> dict[bytes, Member]:
    _refuse_packed(file)
    try:
        source = _Headers(file)
        with tarfile.TarFile(fileobj=cast(IO[bytes], source), encoding="utf-8", errors="surrogateescape") as archive:
            members = dict(_headers(archive, file, source))
            _refuse_early_end(archive.offset, file)
            return members
    except DataError:
        raise
    except Exception as error:  # hostile headers make tarfile raise nearly anything
        raise DataError(f"{file.path} is not a complete, uncompressed .tar: {error or type(error).__name__}") from None


def _headers(archive: tarfile.TarFile, file: ArchiveBytes, source: _Headers) -> Iterator[tuple[bytes, Member]]:
    last = 0
    while (info := archive.next()) is not None:
        if archive.offset <= last:  # a negative size: following it would never end
            raise DataError(f"{file.path}: the header at byte {info.offset} leads backwards; the archive is damaged")
        last = archive.offset
        source.limit = last + _MAX_HEADER_BYTES
        if len(archive.pax_headers) > _MAX_GLOBAL_KEYS:
            raise DataError(f"{file.path}: more than {_MAX_GLOBAL_KEYS} keys in global headers; write it again with `tar`")
        name, member = _member(info)
        if not 0 <= member.size <= file.size - member.offset:
            raise DataError(
                f"{file.path}: {quoted(name)} claims {member.size} bytes from byte {member.offset} on, but the archive has "
                f"only {file.size}: it is damaged or was not copied whole; copy it again"
            )
        yield name, member
        archive.members.clear()  # type: ignore[attr-defined]  # it keeps a kilobyte for each: a million would be a gigabyte


def _refuse_packed(file: ArchiveBytes) -> None:
    start = os.pread(file.descriptor, 8, 0)
    for magic, command in _PACKED.items():
        if start.startswith(magic):
            raise DataError(f"{file.path} is compressed, and files in it cannot be read in place; run `{command} {file.path}`")


def _refuse_early_end(offset: int, file: ArchiveBytes) -> None:
    # tarfile takes a damaged header for the end of the archive; the true end is a block of zeros, or of the file.
    if any(os.pread(file.descriptor, _BLOCK_BYTES, offset)):
        raise DataError(f"{file.path}: the header at byte {offset} is damaged; copy the archive again")


def _member(info: tarfile.TarInfo) -> tuple[bytes, Member]:
    name = info.name.encode("utf-8", "surrogateescape")
    if b".." not in name and (b"./" in name or b"//" in name):
        name = posixpath.normpath(name)
    if info.isreg() and not info.issparse():
        return name, Member(info.offset_data, info.size)
    kinds = {"folder": info.isdir(), "link": info.issym() or info.islnk(), "sparse file": info.issparse()}
    kind = next((kind for kind, is_one in kinds.items() if is_one), "device or other special member")
    return name, Member(0, 0, f"a {kind} in the archive, and only plain files are read from one")


class _Headers:
    """The archive as a file object for tarfile; it limits the header bytes read for each member, whatever a header claims."""

    mode, name = "rb", ""

    def __init__(self, file: ArchiveBytes) -> None:
        self._descriptor, self._position = file.descriptor, 0
        self.limit = _MAX_HEADER_BYTES
        """Byte at which the headers of the current member must end."""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        self._position = position
        return position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.limit - self._position:
            raise tarfile.ReadError(f"headers of more than {_MAX_HEADER_BYTES} bytes for one member, at byte {self._position}")
        data = os.pread(self._descriptor, size, self._position)
        self._position += len(data)
        return data


# --- Listed images, in a folder or in an archive --------------------------------------------------------------------------

MAX_FILE_BYTES = 64 * 2**20
_LOOKED_AT = 100


class ImageFiles(Protocol):
    def read(self, index: int) -> bytes:
        """Read the file of sample `index`; a `DataError` holds the reason alone."""


def read_regular_file(path: bytes | str, max_bytes: int) -> bytes:
    """Read a regular file: one open, one read, one close. FIFOs and devices are refused, never waited for."""
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
    """Read listed images below a folder."""

    def __init__(self, entries: ImageList, folder: bytes, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._entries, self._prefix, self._max_file_bytes = entries, os.path.join(folder, b""), max_file_bytes

    def read(self, index: int) -> bytes:
        return read_regular_file(self._prefix + self._entries.path(index), self._max_file_bytes)


class TarFiles:
    """Read listed images in an archive. Only their positions are kept: two arrays that forked readers share."""

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
    """Read an image list on disk."""
    if os.path.isdir(path):
        raise DataError(
            f"{path}: not a regular file but a folder. For a folder of images write model.get_train_dataloader({path!r})."
        )
    try:
        return read_regular_file(path, MAX_LIST_BYTES)
    except DataError as error:
        raise DataError(f"{path}: {error}. Expected a list with one line `relative/path label` for each image") from None


def open_folder(entries: ImageList, folder: str, split: str) -> FolderFiles:
    """Open the images relative to `folder`, or (Fleet's layout) to `folder/SPLIT`: wherever the first listed ones are."""
    places = [os.path.join(os.fsencode(folder), b""), os.path.join(os.fsencode(folder), os.fsencode(split), b"")]
    return FolderFiles(entries, _choose(entries, places, os.path.lexists, shown=""))


def open_tar(entries: ImageList, archive: Archive, folder: bytes, split: str) -> TarFiles:
    """Open the images in an archive in the same way; `folder` is empty or ends with a slash."""
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
