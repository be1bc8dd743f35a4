"""Find the corpus files of a folder (those listed in `train.txt`, those in `train/`, or all), and read text, plain or gzip.

Nothing outside the folder is read, neither through `..` nor through links, and only regular files.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ...errors import DataError

# --- Reading the lines of a text file, plain or gzip, in large blocks ----------------------------------------------------

BLOCK_BYTES = 2**22
READ_BYTES = 2**17
GZIP_MAGIC = b"\x1f\x8b"


def line_blocks(path: Path, *, name: str, max_bytes: int, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines, each with the number of its first line. A last line without a line end gets one."""
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
                    # In small parts: data unpacked before the damage is counted, so that the message can name the line.
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
    """Read the first line, to find out what kind of file it is."""
    with open_text(path, name=name) as file:
        try:
            return file.read(max_bytes).split(b"\n", 1)[0]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{name}, line 1: the gzip data is damaged ({error}).") from error


@contextlib.contextmanager
def open_text(path: Path, *, name: str) -> Iterator[io.BufferedIOBase]:
    """Open a regular file, unpacking gzip. Pipes and devices are refused: they would hang or never end."""
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
            raise DataError(f"{name}: named like a gzip file, but it is not one.")
        if not packed:
            yield raw
            return
        with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
            yield unpacked


# --- Choosing the files of the corpus ---------------------------------------------------------------------------------------

Kind: TypeAlias = Literal["auto", "digital", "raw"]

_TRAIN_LISTS, _TEST_LISTS = ("train.txt",), ("val.txt", "test.txt")
_TRAIN_FOLDER, _TEST_FOLDERS = "train", ("val", "validation", "test")
_VOCABULARY = "vocab.txt"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextFile:
    """A corpus file with its size and time at the moment it was found."""

    path: Path
    name: str  # used in messages
    size: int
    mtime_ns: int


def require_unchanged(file: TextFile) -> None:
    """Raise if the file has changed since it was found: it may have been read half old, half new."""
    if text_file(file.path, file.name) != file:
        raise DataError(f"{file.name}: changed while it was read. Start again when it is complete.")


def find_files(
    data_dir: Path, *, train: bool, kind: Kind, suffixes: Sequence[str] | None, leave_out: Path | None
) -> list[TextFile]:
    """Find the corpus files in a fixed order: the listed ones of a folder with a list, else all; or the one file given."""
    if data_dir.is_file():
        return [text_file(data_dir, str(data_dir))]
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: there is no such folder. Give the folder that holds the text files.")
    if kind != "raw" and (listed := _list_file(data_dir, train=train)) is not None:
        return read_list(listed, data_dir)
    data_dir = _split_folder(data_dir, train=train)
    found = _of_split(data_dir, walk(data_dir, suffixes=suffixes, leave_out=leave_out), train=train)
    if not found:
        wanted = f" with the endings {', '.join(suffixes)}" if suffixes else ""
        raise DataError(f"{data_dir}: no text files{wanted} in this folder.")
    return found


def _split_folder(data_dir: Path, *, train: bool) -> Path:
    """Return the folder of the split where there are several, `train` and one for evaluation; else the folder itself."""
    evaluation = next((data_dir / name for name in _TEST_FOLDERS if (data_dir / name).is_dir()), None)
    if evaluation is None or not (data_dir / _TRAIN_FOLDER).is_dir():
        return data_dir
    return data_dir / _TRAIN_FOLDER if train else evaluation


def _of_split(data_dir: Path, found: list[TextFile], *, train: bool) -> list[TextFile]:
    """Select the split: train.txt, val.txt and test.txt that hold data themselves are never used for another split."""
    by_name = {file.path.name: file for file in found if file.path.parent == data_dir}
    rest = [file for file in found if file not in by_name.values() or file.path.name not in (*_TEST_LISTS, _VOCABULARY)]
    if train:
        return rest
    for name in _TEST_LISTS:
        if name in by_name:
            return [by_name[name]]
    for name in _TRAIN_LISTS:
        if name in by_name:
            raise DataError(f"{data_dir}: has {name}, but no {' or '.join(_TEST_LISTS)} for evaluation.")
    return rest


def _list_file(data_dir: Path, *, train: bool) -> Path | None:
    """Find the list of the split (train.txt, or val.txt or test.txt), unless that file holds data itself."""
    present = [name for name in (*_TRAIN_LISTS, *_TEST_LISTS) if (data_dir / name).is_file()]
    lists = [name for name in present if not _looks_digital(first_line(data_dir / name, name=str(data_dir / name)))]
    for name in _TRAIN_LISTS if train else _TEST_LISTS:
        if name in lists:
            return data_dir / name
    if lists:
        wanted = " or ".join(_TRAIN_LISTS if train else _TEST_LISTS)
        raise DataError(
            f"{data_dir}: has {' and '.join(lists)}, but no list {wanted} for {'training' if train else 'evaluation'}."
        )
    return None


def read_list(list_path: Path, root: Path) -> list[TextFile]:
    """Read a list of one file name per line, relative to the root, each once."""
    files: dict[str, TextFile] = {}
    for first, block in line_blocks(list_path, name=str(list_path), max_bytes=2**28, max_line_bytes=2**14):
        for number, line in enumerate(block[:-1].split(b"\n"), start=first):
            where = f"{list_path}, line {number}:"
            name = _listed_name(line, where)
            if name in files:
                raise DataError(f"{where} {name!r} is listed twice.")
            path = root / name
            if not path.exists():
                raise DataError(
                    f'{where} there is no file {path}. If {list_path.name} is itself text to train on, say kind="raw".'
                )
            if not path.resolve().is_relative_to(root.resolve()):
                raise DataError(f"{where} {name!r} is a link that leads out of {root}. List files inside it.")
            files[name] = text_file(path, str(path))
    if not files:
        raise DataError(f"{list_path}, line 1: the list is empty. Write one file name per line.")
    return list(files.values())


def _listed_name(line: bytes, where: str) -> str:
    if line.startswith(_BOM):
        raise DataError(f"{where} begins with a byte order mark. Save the list as UTF-8 without one.")
    if line.endswith(b"\r"):
        raise DataError(f"{where} has a Windows line end. Convert the list with `sed -i 's/\\r$//' FILE`.")
    try:
        name = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} byte {line[error.start]:#04x} in column {error.start + 1} is not UTF-8.") from None
    if not name.strip() or "\0" in name:
        raise DataError(f"{where} {name!r} is no file name. Write one file name per line, and no empty lines.")
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise DataError(f"{where} {name!r} leads out of the folder. Names are relative to it, without `..`.")
    return name


def walk(root: Path, *, suffixes: Sequence[str] | None, leave_out: Path | None = None) -> list[TextFile]:
    """Find all files below the root, sorted by name, without hidden ones and `__pycache__`. Links out of it are refused."""
    real_root, skipped = root.resolve(), leave_out.resolve() if leave_out else None
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted((*names, *folders)):
            path = Path(folder, name)
            if path.is_symlink():
                if not path.resolve().is_relative_to(real_root):
                    raise DataError(f"{path}: a link that leads out of {root}. Copy what it points to, or remove it.")
                continue
            wanted = name in names and not name.startswith(".") and (suffixes is None or path.suffix in suffixes)
            if wanted and path.resolve() != skipped:
                found.append(text_file(path, str(path)))
    return sorted(found, key=lambda file: file.path.relative_to(root).parts)


def text_file(path: Path, name: str) -> TextFile:
    try:
        entry = path.stat()
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error}).") from error
    if not stat.S_ISREG(entry.st_mode):
        raise DataError(f"{name}: not a regular file.")
    return TextFile(path, name, entry.st_size, entry.st_mtime_ns)


def is_digital(files: Sequence[TextFile]) -> bool:
    """Check whether these files hold Fleet's lines of numbers, by the first line of the first non-empty file."""
    for file in files:
        if file.size:
            return file.path.suffix == ".gz" or _looks_digital(first_line(file.path, name=file.name))
    raise DataError(
        f"{files[0].name}, line 1: the file is empty, and so are the other {len(files) - 1}. There is nothing to train on."
    )


def _looks_digital(line: bytes) -> bool:
    """Check for mostly numbers, so that a damaged line of numbers is reported and not trained on as prose."""
    words = line.removeprefix(_BOM).replace(b";", b" ").split()
    return 2 * sum(word.lstrip(b"-").isdigit() for word in words) > len(words)
