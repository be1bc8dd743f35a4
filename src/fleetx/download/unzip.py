"""zip, stored or deflated. What the list at its end claims is compared with what really comes out."""

from __future__ import annotations

import stat
import zipfile
import zlib
from collections.abc import Callable
from typing import IO

from .names import shown
from .writer import MAX_LINK_BYTES, BadMember, Writer

_ENCRYPTED = 0x1
_PLAIN_KINDS = (0, stat.S_IFREG, stat.S_IFDIR)
READ_ERRORS = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, NotImplementedError, ValueError, OverflowError)


def unzip(file: IO[bytes], max_stream_bytes: int, writer: Writer) -> None:
    """All members. Raises BadMember with a whole sentence."""
    left = max_stream_bytes

    def counted(read: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def take(count: int) -> bytes:
            nonlocal left
            data = read(count)
            left -= len(data)
            if left < 0:
                raise BadMember(
                    f"is more than {max_stream_bytes} bytes in all, far more than its size lets expect (see max_ratio)"
                )
            return data

        return take

    member = None
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                _write(archive, member, counted, writer)
        writer.finish()
    except READ_ERRORS as error:
        where = f" at {shown(member.orig_filename)}" if member is not None else ""
        raise BadMember(f"is not a readable zip file{where}: {shown(str(error))}") from None


def _write(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    counted: Callable[[Callable[[int], bytes]], Callable[[int], bytes]],
    writer: Writer,
) -> None:
    name = member.orig_filename  # filename is cut at a NUL
    mode = member.external_attr >> 16
    try:
        if member.flag_bits & _ENCRYPTED:
            raise BadMember("is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadMember(f"is compressed by method {member.compress_type}; only deflate (8) and stored (0) are read")
        if stat.S_IFMT(mode) == stat.S_IFLNK:
            if member.file_size > MAX_LINK_BYTES:
                raise BadMember("is a link without a usable target")
            with archive.open(member) as source:  # in one piece of this size: read() takes 2 GiB of zeros into memory at once
                target = source.read(MAX_LINK_BYTES + 1)
            writer.symbolic_link(name, target.decode("utf-8", "surrogateescape"))
        elif stat.S_IFMT(mode) not in _PLAIN_KINDS:
            raise BadMember("is a device, a pipe or the like; only files, folders and links are unpacked")
        elif name.endswith("/") or stat.S_ISDIR(mode):
            writer.folder(name)
        else:
            with archive.open(member) as source:
                take = counted(source.read)
                writer.file(name, take, member.file_size, executable=bool(mode & 0o100))
                take(1)  # past the end: only there the checksum is compared, and a longer file than claimed found out
    except BadMember as error:
        raise BadMember(f": the member {shown(name)} {error}") from None
    except OSError as error:
        raise BadMember(f": the member {shown(name)} cannot be unpacked: {error.strerror}") from None
