"""tar, tar.gz and tar.xz, read forwards only. `Stream` guards the memory, `Writer` the disk."""

from __future__ import annotations

import gzip
import lzma
import sys
import tarfile
import zlib
from collections.abc import Callable
from typing import IO

from .names import shown
from .writer import CHUNK_BYTES, BadMember, Writer

BLOCK_BYTES = 512
MAX_HEADER_BYTES = 2 * CHUNK_BYTES
"""All headers of one member: tarfile takes long names, extended headers and maps of holes into memory, however long they are."""
MAX_GLOBAL_KEYS = 100
"""They are copied for every member: a million of them would keep it busy for days."""
XZ_MEMORY_BYTES = 2**30
READ_ERRORS = (
    *(tarfile.TarError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, EOFError),
    *(ValueError, OverflowError, IndexError, RecursionError),  # numbers, names and chains of headers that tarfile does not expect
)


def untar(file: IO[bytes], kind: str, max_stream_bytes: int, writer: Writer) -> None:
    """All members. Raises BadMember with a whole sentence."""
    stream = Stream(_plain_bytes(file, kind), max_stream_bytes)
    member = None
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                if len(tar.pax_headers) > MAX_GLOBAL_KEYS:
                    raise BadMember(f"has more than {MAX_GLOBAL_KEYS} keys in its global headers")
                stream.limit = tar.offset
                _write(tar, member, writer)
                tar.members.clear()  # it would keep every header of a million files
                stream.limit = tar.offset + MAX_HEADER_BYTES
        if stream.last != bytes(BLOCK_BYTES):
            raise BadMember("breaks off: its end mark is missing, or it is damaged in the middle")
        _read_to_the_end(stream)
        writer.finish()
    except READ_ERRORS as error:
        where = f" after {shown(member.name)}" if member is not None else ""
        raise BadMember(f"is not a readable {kind} file{where}: {shown(str(error))}") from None


def _read_to_the_end(stream: Stream) -> None:
    """Where gzip and xz keep their checksums. Two archives joined by `cat` would be unpacked by half."""
    stream.limit = sys.maxsize
    while rest := stream.read(CHUNK_BYTES):
        if rest.count(0) < len(rest):
            raise BadMember("goes on after its end mark; if it is several archives joined, list each on its own")


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, writer: Writer) -> None:
    try:
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
            assert source is not None  # given for every plain file
            with source:
                writer.file(member.name, source.read, member.size, executable=bool(member.mode & 0o100))
    except BadMember as error:
        raise BadMember(f": the member {shown(member.name)} {error}") from None
    except gzip.BadGzipFile:  # an OSError too, but of reading
        raise
    except OSError as error:
        raise BadMember(f": the member {shown(member.name)} cannot be written: {error.strerror}") from None


def _plain_bytes(file: IO[bytes], kind: str) -> Callable[[int], bytes]:
    if kind == "tar":
        return file.read
    return gzip.GzipFile(fileobj=file, mode="rb").read if kind == "tar.gz" else _Xz(file).read


class Stream:
    """What tarfile reads from: it only goes forwards, and ends at a limit."""

    def __init__(self, read: Callable[[int], bytes], max_bytes: int) -> None:
        self.last = b""
        """What was read last: after the end of a whole archive, a block of zeros."""
        self.limit = MAX_HEADER_BYTES
        """Where what is now read must end: a member's headers, or its data. Skipping is free."""
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
            raise BadMember(f"unpacks to more than {self._max_bytes} bytes, far more than its size lets expect (see max_ratio)")
        return self.last

    def seek(self, position: int) -> None:
        if position < self._position:
            raise BadMember("leads backwards")
        while self._position < position and self._take(min(CHUNK_BYTES, position - self._position)):
            pass


class _Xz:
    """lzma.LZMAFile with a limit on memory: a header may ask for a dictionary of 4 GiB."""

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
