"""Write the members of an untrusted archive into a fresh folder, within limits on bytes and files.

All that is unpacked passes here: plain files and folders, each file once, its bytes counted as they are written (a header may
claim anything). Links are made last, when no file can be written through them, and must lead to something in the same
archive. extractall() of tarfile and zipfile is not used: it has no limits, and the data filter knows no zip.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .folder import BadName, parts_of, shown

CHUNK_BYTES = 2**20
SMALL_BYTES = 64 * 2**20
"""Bytes that any archive may unpack to, however small it is: a few kB of zeros are no attack."""
MAX_LINK_BYTES = 4096
TOO_MUCH = "far more than its size lets expect (see max_ratio)"


@dataclass(frozen=True, slots=True)
class Limits:
    """Most bytes and files of an archive, and most bytes for each byte of its own."""

    max_bytes: int
    max_files: int
    max_ratio: float

    def stream_bytes(self, archive_bytes: int) -> int:
        """Return how many bytes a compressed archive of this size may expand to, written or not."""
        return max(SMALL_BYTES, int(min(self.max_ratio * archive_bytes, 2.0**62)))


class BadMember(Exception):
    """Raised for a refused member; the text is a sentence without its subject."""


class Writer:
    """Writes the members of one archive below one fresh folder. Raises BadMember."""

    def __init__(
        self, folder: str, limits: Limits, size: int, kept: Collection[str], below: tuple[str, ...], wrote: Callable[[], None]
    ) -> None:
        """Prepare to write into `folder`. `size`: bytes of the archive, which lies in `below`; `wrote` is called after each
        piece."""
        self.files = self.bytes = 0
        self.max_stream_bytes = limits.stream_bytes(size)
        self._wrote = wrote
        self._folder, self._limits, self._kept, self._below = os.path.realpath(folder), limits, kept, below
        self._entries = 0
        self._folders: set[str] = {""}
        self._plain: set[str] = set()
        self._links: list[tuple[str, str]] = []

    def folder(self, name: str) -> None:
        self._make_folders(self._parts(name))

    def file(self, name: str, read: Callable[[int], bytes], size: int, *, executable: bool) -> None:
        """Write a file of exactly `size` bytes, with the rights of any new file: no setuid bit."""
        place = self._place(name)
        if size < 0:
            raise BadMember(f"claims a size of {size} bytes")
        if self.bytes + size > self._limits.max_bytes:
            raise BadMember(f"would make more than max_unpacked_bytes={self._limits.max_bytes} bytes in all")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(f"{self._folder}/{place}", flags, 0o777 if executable else 0o666)
        except FileExistsError:
            raise BadMember("is there twice") from None
        with open(handle, "wb", buffering=0) as file:
            self._copy(read, file.write, size)
        self._plain.add(place)
        self.files += 1

    def _copy(self, read: Callable[[int], bytes], write: Callable[[memoryview], int | None], size: int) -> None:
        left = size
        while left:
            chunk = read(min(CHUNK_BYTES, left))
            if not chunk:
                raise BadMember(f"ends after {size - left} of {size} bytes")
            left -= len(chunk)
            self.bytes += len(chunk)
            if self.bytes > self.max_stream_bytes:
                raise BadMember(f"is more than {self.max_stream_bytes} bytes in all, {TOO_MUCH}")
            self._wrote()
            view = memoryview(chunk)
            while view:
                view = view[write(view) or 0 :]

    def hard_link(self, name: str, target: str) -> None:
        try:
            other = "/".join(parts_of(target))
        except BadName as error:
            raise BadMember(f"is a hard link to {shown(target)}, which {error}") from None
        if other not in self._plain:
            raise BadMember(f"is a hard link to {shown(target)}, which is not a file that came before it in the archive")
        place = self._place(name)
        try:
            os.link(f"{self._folder}/{other}", f"{self._folder}/{place}", follow_symlinks=False)
        except FileExistsError:
            raise BadMember("is there twice") from None
        self._plain.add(place)
        self.files += 1

    def symbolic_link(self, name: str, target: str) -> None:
        if not target or "\0" in target or len(os.fsencode(target)) > MAX_LINK_BYTES:
            raise BadMember("is a link without a usable target")
        if target.startswith("/"):
            raise BadMember(f"is a link to {shown(target)}; links must stay inside the archive")
        self._links.append((self._place(name), target))

    def finish(self) -> None:
        """Make all links, and then follow each: one may lead through another."""
        for place, target in self._links:
            try:
                os.symlink(target, f"{self._folder}/{place}")
            except FileExistsError:
                raise BadMember(f": the member {shown(place)} is there twice, once as a link") from None
        for place, target in self._links:
            link = f": the member {shown(place)} is a link to {shown(target)}"
            try:
                os.stat(f"{self._folder}/{place}")  # first: the kernel refuses a chain of 40, realpath would follow millions
                end = os.path.realpath(f"{self._folder}/{place}", strict=True)
            except OSError:
                raise BadMember(f"{link}, which is not in the archive") from None
            if os.path.commonpath([end, self._folder]) != self._folder:
                raise BadMember(f"{link}; links must stay inside the archive")

    def _parts(self, name: str) -> tuple[str, ...]:
        try:
            return parts_of(name)
        except BadName as error:
            raise BadMember(str(error)) from None

    def _place(self, name: str) -> str:
        parts = self._parts(name)
        if not parts:
            raise BadMember("is a file without a name")
        if "/".join((*self._below, *parts)) in self._kept:
            raise BadMember("would replace a file of the manifest")
        self._make_folders(parts[:-1])
        self._count()
        return "/".join(parts)

    def _make_folders(self, parts: tuple[str, ...]) -> None:
        for depth in range(1, len(parts) + 1):
            place = "/".join(parts[:depth])
            if place not in self._folders:
                self._count()  # folders too: each takes room on the disk
                try:
                    os.mkdir(f"{self._folder}/{place}")
                except FileExistsError:
                    raise BadMember(f"needs the folder {shown(place)}, which is also a file") from None
                self._folders.add(place)

    def _count(self) -> None:
        self._entries += 1
        if self._entries > self._limits.max_files:
            raise BadMember(f"would make more than max_files={self._limits.max_files} files and folders in all")
