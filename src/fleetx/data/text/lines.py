"""The lines of a text file, plain or gzip, in large blocks: bounded in memory, strict about what is no text file."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from ...errors import DataError

BLOCK_BYTES = 2**22
READ_BYTES = 2**17
GZIP_MAGIC = b"\x1f\x8b"


def line_blocks(path: Path, *, name: str, max_bytes: int, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines, each with the number of its first line. A last line without a line end gets one."""
    line, total, rest = 1, 0, b""
    for piece in _pieces(path, name=name):
        total += len(piece)
        if total > max_bytes:
            raise DataError(f"{name}: more than {max_bytes} bytes of text. Split the file, or allow more with max_file_bytes.")
        block = rest + piece
        end = block.rfind(b"\n") + 1
        if end:
            yield line, block[:end]
        line += block.count(b"\n", 0, end)
        rest = block[end:]
        if len(rest) > max_line_bytes:
            raise DataError(f"{name}, line {line}: longer than {max_line_bytes} bytes, so this is no file of lines.")
    if rest:
        yield line, rest + b"\n"


def _pieces(path: Path, *, name: str) -> Iterator[bytes]:
    lines = 0
    with open_text(path, name=name) as file:
        while True:
            parts, size, failure = [], 0, None
            while size < BLOCK_BYTES:
                try:
                    # In small parts: what was unpacked before the damage is still counted, so that the message can name a line.
                    part = file.read1(READ_BYTES)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    failure = f"the gzip data is damaged from here on ({error})"
                    break
                except OSError as error:
                    failure = f"cannot be read from here on ({error.strerror or error})"
                    break
                if not part:
                    break
                parts.append(part)
                size += len(part)
            piece = b"".join(parts)
            lines += piece.count(b"\n")
            if failure:
                raise DataError(f"{name}, line {lines + 1}: {failure}.")
            if not piece:
                return
            yield piece


def first_line(path: Path, *, name: str, max_bytes: int = 2**16) -> bytes:
    """The start of the file up to its first line end, to find out what kind of file it is."""
    with open_text(path, name=name) as file:
        try:
            return file.read(max_bytes).split(b"\n", 1)[0]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{name}, line 1: the gzip data is damaged ({error}).") from error


@contextlib.contextmanager
def open_text(path: Path, *, name: str) -> Iterator[io.BufferedIOBase]:
    """A regular file, unpacked if it is gzip. A pipe or a device would hang or never end."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{name}: cannot be opened ({error.strerror or error}).") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{name}: not a regular file.")
    with open(handle, "rb") as raw:
        packed = raw.peek(2)[:2] == GZIP_MAGIC
        if path.suffix == ".gz" and not packed and raw.peek(1):
            raise DataError(f"{name}: named like a gzip file, but it is none.")
        if not packed:
            yield raw
            return
        with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
            yield unpacked
