"""Unpack a tar, tar.gz, tar.xz or zip into its own folder: all of it, or nothing.

Members are written into a fresh folder aside, which is moved in once every member was accepted. A kill before the move leaves
only that folder, which the next call removes. A kill during the move leaves whole files, and no record that the archive is
unpacked: the next call unpacks it again. `Stream` guards the memory, `Writer` the disk.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import lzma
import os
import shutil
import stat
import sys
import tarfile
import uuid
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import IO

from ..errors import DataError
from .folder import below, open_to_read, shown
from .manifest import Entry
from .once_per_node import UNPACKING
from .writer import CHUNK_BYTES, MAX_LINK_BYTES, TOO_MUCH, BadMember, Limits, Writer

KEPT_NAMES = 1000
BLOCK_BYTES = 512
MAX_HEADER_BYTES = 2 * CHUNK_BYTES
"""Most bytes of headers of one member: tarfile reads long names, extended headers and maps of holes into memory whole."""
MAX_GLOBAL_KEYS = 100
"""Most keys in global headers: tarfile copies them for every member."""
XZ_MEMORY_BYTES = 2**30
READ_ERRORS = (
    *(tarfile.TarError, zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, lzma.LZMAError, gzip.BadGzipFile, EOFError),
    *(ValueError, OverflowError, IndexError, RecursionError, NotImplementedError),  # from headers that the readers do not expect
)
_ENCRYPTED = 0x1
_PLAIN_KINDS = (0, stat.S_IFREG, stat.S_IFDIR)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What an archive was unpacked to."""

    files: int
    bytes: int
    names: list[str]
    """Names at the top (the first KEPT_NAMES): the archive counts as unpacked while they exist."""


def unpack(
    root: int, root_path: str, entry: Entry, limits: Limits, kept: Collection[str], received: Callable[[int], None]
) -> Unpacked:
    """Unpack an archive. It may not replace `kept`, the paths of the manifest; `received` is called with the bytes read of it."""
    with below(root, entry.parts[:-1]) as folder, _fresh_folder(root) as name:
        archive = open_to_read(folder, entry.parts[-1])
        if archive is None:
            raise DataError(f"{entry.path} has vanished from the target before it was unpacked.")
        try:
            with open(archive, "rb") as file:
                size, place = os.fstat(archive).st_size, entry.parts[:-1]
                writer = Writer(f"{root_path}/{name}", limits, size, kept, place, lambda: received(file.tell()))
                if entry.archive_kind == "zip":
                    unzip(file, writer)
                else:
                    untar(file, entry.archive_kind or "", writer)
        except BadMember as error:
            text = str(error)
            raise DataError(f"{entry.path}{text if text.startswith(':') else ' ' + text}. Nothing of it was unpacked.") from None
        with below(root, (name,)) as aside:
            names = sorted(os.listdir(aside))[:KEPT_NAMES]
            _check_conflicts(aside, folder, entry.path, entry.parts[:-1])
            _move_in(aside, folder)
        os.sync()  # once: a million single fsyncs take hours
        return Unpacked(writer.files, writer.bytes, names)


@contextlib.contextmanager
def _fresh_folder(root: int) -> Iterator[str]:
    name = f"{UNPACKING}{uuid.uuid4().hex}"
    os.mkdir(name, 0o700, dir_fd=root)
    try:
        yield name
    finally:
        shutil.rmtree(name, dir_fd=root)


def _check_conflicts(source: int, target: int, archive: str, place: tuple[str, ...]) -> None:
    """Refuse what cannot be moved in, before the first file is moved."""
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
            with below(source, (name,)) as inner, below(target, (name,)) as outer:
                _check_conflicts(inner, outer, archive, (*place, name))


def _move_in(source: int, target: int) -> None:
    """Move files in: existing folders are merged, existing files replaced, links not followed."""
    for name in os.listdir(source):
        try:
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            with below(source, (name,)) as inner, below(target, (name,)) as outer:
                _move_in(inner, outer)


@contextlib.contextmanager
def _member_named(name: str) -> Iterator[None]:
    """Put the name of a member before the reason why it is refused, or cannot be written."""
    try:
        yield
    except BadMember as error:
        raise BadMember(f": the member {shown(name)} {error}") from None
    except gzip.BadGzipFile:  # an OSError too, but raised by reading
        raise
    except OSError as error:
        raise BadMember(f": the member {shown(name)} cannot be written: {error.strerror}") from None


def untar(file: IO[bytes], kind: str, writer: Writer) -> None:
    """Write all members of a tar. Raises BadMember with a whole sentence."""
    stream = Stream(_plain_bytes(file, kind), writer.max_stream_bytes)
    member = None
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                if len(tar.pax_headers) > MAX_GLOBAL_KEYS:
                    raise BadMember(f"has more than {MAX_GLOBAL_KEYS} keys in its global headers")
                stream.limit = tar.offset
                _write_tar(tar, member, writer)
                tar.members.clear()  # tarfile would keep the headers of a million files
                stream.limit = tar.offset + MAX_HEADER_BYTES
        if stream.last != bytes(BLOCK_BYTES):
            raise BadMember("breaks off: its end mark is missing, or it is damaged in the middle")
        _read_to_the_end(stream)
        writer.finish()
    except READ_ERRORS as error:
        where = f" after {shown(member.name)}" if member is not None else ""
        raise BadMember(f"is not a readable {kind} file{where}: {shown(str(error))}") from None


def _read_to_the_end(stream: Stream) -> None:
    """Read to the end, where gzip and xz keep their checksums, and refuse a second archive joined by `cat`."""
    stream.limit = sys.maxsize
    while rest := stream.read(CHUNK_BYTES):
        if rest.count(0) < len(rest):
            raise BadMember("goes on after its end mark; if it is several archives joined, list each on its own")


def _write_tar(tar: tarfile.TarFile, member: tarfile.TarInfo, writer: Writer) -> None:
    with _member_named(member.name):
        if member.isdir():
            writer.folder(member.name)
        elif member.issym():
            writer.symbolic_link(member.name, member.linkname)
        elif member.islnk():
            writer.hard_link(member.name, member.linkname)
        elif member.issparse() or not member.isreg():
            kinds = {tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.FIFOTYPE: "a pipe"}
            kind = "a sparse file" if member.issparse() else kinds.get(member.type, f"of the unknown kind {member.type!r}")
            raise BadMember(f"is {kind}; only files, folders and links are unpacked")
        else:
            source = tar.extractfile(member)
            assert source is not None  # a plain file has one
            with source:
                writer.file(member.name, source.read, member.size, executable=bool(member.mode & 0o100))


def _plain_bytes(file: IO[bytes], kind: str) -> Callable[[int], bytes]:
    if kind == "tar":
        return file.read
    return gzip.GzipFile(fileobj=file, mode="rb").read if kind == "tar.gz" else _Xz(file).read


class Stream:
    """The stream that tarfile reads: it goes forwards only, and ends at a limit."""

    def __init__(self, read: Callable[[int], bytes], max_bytes: int) -> None:
        self.last = b""
        """Bytes of the last read: after the end of a whole archive, a block of zeros."""
        self.limit = MAX_HEADER_BYTES
        """Offset where the headers or the data that are being read must end. Skipping is free."""
        self._read, self._max_bytes, self._position = read, max_bytes, 0

    def tell(self) -> int:
        return self._position

    def read(self, count: int) -> bytes:
        if not 0 <= count <= self.limit - self._position:
            raise BadMember(f"has headers of more than {MAX_HEADER_BYTES} bytes for one member")
        return self._take(count)

    def _take(self, count: int) -> bytes:
        pieces, left = [], count
        while left and (piece := self._read(left)):
            pieces.append(piece)
            left -= len(piece)
        self.last = b"".join(pieces)
        self._position += len(self.last)
        if self._position > self._max_bytes:
            raise BadMember(f"unpacks to more than {self._max_bytes} bytes, {TOO_MUCH}")
        return self.last

    def seek(self, position: int) -> None:
        if position < self._position:
            raise BadMember("leads backwards")
        while self._position < position and self._take(min(CHUNK_BYTES, position - self._position)):
            pass


class _Xz:
    """Reader of xz with a limit on memory, which lzma.LZMAFile lacks: a header may ask for a dictionary of 4 GiB."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._unxz: lzma.LZMADecompressor | None = None
        self._rest = b""

    def read(self, count: int) -> bytes:
        while True:
            if self._unxz is None or self._unxz.eof:
                rest = self._rest if self._unxz is None else self._unxz.unused_data
                self._rest = rest.lstrip(b"\0") or self._file.read(CHUNK_BYTES).lstrip(b"\0")  # streams may be padded with zeros
                if not self._rest:
                    return b""
                self._unxz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)
                data = self._rest
            else:
                data = self._file.read(CHUNK_BYTES // 8) if self._unxz.needs_input else b""
                if self._unxz.needs_input and not data:
                    raise EOFError("it ends in the middle")
            if out := self._unxz.decompress(data, max_length=count):
                return out


def unzip(file: IO[bytes], writer: Writer) -> None:
    """Write all members of a zip. Raises BadMember with a whole sentence."""
    member = None
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                _write_zip(archive, member, writer)
        writer.finish()
    except READ_ERRORS as error:
        where = f" at {shown(member.orig_filename)}" if member is not None else ""
        raise BadMember(f"is not a readable zip file{where}: {shown(str(error))}") from None


def _write_zip(archive: zipfile.ZipFile, member: zipfile.ZipInfo, writer: Writer) -> None:
    name = member.orig_filename  # `filename` ends at a NUL
    mode = member.external_attr >> 16
    with _member_named(name):
        if member.flag_bits & _ENCRYPTED:
            raise BadMember("is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadMember(f"is compressed by method {member.compress_type}; only deflate (8) and stored (0) are read")
        if stat.S_IFMT(mode) == stat.S_IFLNK:
            if member.file_size > MAX_LINK_BYTES:
                raise BadMember("is a link without a usable target")
            with archive.open(member) as source:  # read() without a size could take 2 GiB of zeros into memory
                target = source.read(MAX_LINK_BYTES + 1)
            writer.symbolic_link(name, target.decode("utf-8", "surrogateescape"))
        elif stat.S_IFMT(mode) not in _PLAIN_KINDS:
            raise BadMember("is a device, a pipe or the like; only files, folders and links are unpacked")
        elif name.endswith("/") or stat.S_ISDIR(mode):
            writer.folder(name)
        else:
            with archive.open(member) as source:
                writer.file(name, source.read, member.file_size, executable=bool(mode & 0o100))
                source.read(1)  # past the end: only there are checksum and length compared
