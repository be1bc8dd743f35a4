"""Parse a list of labelled images, one `relative/path label` per line, checked as a whole before training.

    train/cat/0001.jpg 3
    train/two words.png 7        the last field is the label: names may contain spaces

Sample i is line i + 1: there are no comments and no empty lines, so that every message can name the line.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...config.kinds import integer
from ...errors import DataError

Numbers: TypeAlias = npt.NDArray[np.int64]

LABEL_LIMIT = 2**31
"""Upper bound of labels when the number of classes is not given."""
MAX_LIST_BYTES = 2 * 2**30
_MAX_PATH_BYTES = 4096
_LABEL_DIGITS = 18
_SHOWN_FAULTS = 5
_COUNTED_FAULTS = 1000
_FORM = "`relative/path label`"


@dataclass(frozen=True, slots=True)
class ImageList:
    """Hold paths and labels in three large objects: forked readers touch no reference count per path, so memory stays shared."""

    name: str
    text: bytes
    offsets: Numbers
    labels: Numbers
    classes: tuple[str, ...] = ()
    """Names of the classes by their number, where the images lie in folders of classes; empty for a list of lines."""

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> bytes:
        """Return the path of one image, relative and without `..`."""
        return self.text[self.offsets[index] : self.offsets[index + 1]]

    def name_of(self, index: int) -> str:
        """Return the path as messages show it."""
        return repr(self.path(index).decode("utf-8"))[1:-1]

    def place(self, index: int) -> str:
        """Return the sample's list and line for messages: `train.txt, line 17`; or the folder of its class's folder."""
        return self.name if self.classes else _line(self.name, index + 1)

    def describe(self, index: int) -> str:
        """Return the sample's place and path for messages: `train.txt, line 17: cat/0001.jpg`."""
        return f"{self.place(index)}: {self.name_of(index)}"


def parse_line(line: bytes, label_limit: int) -> tuple[bytes, int]:
    """Parse one line into path and label; a `ValueError` says what is wrong with it."""
    fields = line.rsplit(None, 1)
    if len(fields) != 2:
        raise ValueError(f"expected {_FORM}, got {quoted(line)}{'' if line.strip() else ', an empty line: remove it'}")
    path, digits = fields
    if not digits.isdigit() or len(digits) > _LABEL_DIGITS or (label := int(digits)) >= label_limit:
        raise ValueError(f"the label must be an integer from 0 to {label_limit - 1}, got {quoted(digits)} in {quoted(line)}")
    if b"/" in path or b"." in path[:2]:
        path = _plain_path(path)
    if path[0] <= 32 or len(path) > _MAX_PATH_BYTES:
        raise ValueError(f"the path must not begin with a space nor exceed {_MAX_PATH_BYTES} bytes, got {quoted(line)}")
    return path, label


def parse_image_list(text: bytes, name: str, *, num_classes: int | None = None) -> ImageList:
    """Parse the list in `text`. Messages call it `name`; labels must be below `num_classes`."""
    label_limit: int = integer(1, LABEL_LIMIT).check("num_classes", LABEL_LIMIT if num_classes is None else num_classes)
    _refuse_odd_bytes(text, name)
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError(f"{name} is empty: expected one line {_FORM} for each image")
    paths: list[bytes] = []
    labels: list[int] = []
    faults: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            path, label = parse_line(line, label_limit)
        except ValueError as fault:
            faults.append((number, str(fault)))
            if len(faults) > _COUNTED_FAULTS:
                break
            continue
        paths.append(path)
        labels.append(label)
    if faults:
        raise DataError(_all_faults(name, faults))
    return ImageList(name, b"".join(paths), offsets_of(paths), np.array(labels, dtype=np.int64))


def offsets_of(paths: list[bytes]) -> Numbers:
    """Return where each path begins in all of them joined, and where the last one ends."""
    offsets = np.zeros(len(paths) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, paths), dtype=np.int64, count=len(paths)), out=offsets[1:])
    return offsets


def quoted(text: bytes, limit: int = 80) -> str:
    """Quote received bytes for one line of a message: escaped, and shortened where long."""
    shown = text[:limit].decode("utf-8", "backslashreplace")
    return repr(shown) + (f"... ({len(text)} bytes)" if len(text) > limit else "")


def _plain_path(path: bytes) -> bytes:
    if path.startswith(b"/"):
        raise ValueError(f"the path must be relative to the images' folder, got the absolute {quoted(path)}")
    if b".." in path and b".." in path.split(b"/"):
        raise ValueError(f"the path must stay inside the images' folder, got `..` in {quoted(path)}")
    return posixpath.normpath(path) if b"./" in path or b"//" in path else path


def _refuse_odd_bytes(text: bytes, name: str) -> None:
    """Refuse bytes that editors hide and that would end up in a file name."""
    if text.startswith(b"\xef\xbb\xbf"):
        fix = f"remove it with `sed -i '1s/^\\xEF\\xBB\\xBF//' {name}`"
        raise DataError(f"{_line(name, 1)}: begins with a byte order mark; {fix}")
    for byte, what in ((b"\0", "a NUL byte: this is no text file"), (b"\r", "a carriage return (Windows line ends)")):
        found = text.find(byte)
        if found >= 0:
            fix = f"; convert with `sed -i 's/\\r$//' {name}`" if byte == b"\r" else f"; expected lines {_FORM}"
            raise DataError(f"{_line_at(text, found, name)}: contains {what}{fix}")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        place = _line_at(text, error.start, name)
        bad = quoted(text[error.start : error.start + 1])
        raise DataError(f"{place}: the byte {bad} is not UTF-8; convert with `iconv -f LATIN1 -t UTF-8 {name}`") from None


def _all_faults(name: str, faults: list[tuple[int, str]]) -> str:
    number, reason = faults[0]
    rest = faults[1:]
    if not rest:
        return f"{_line(name, number)}: {reason}"
    count = f"more than {_COUNTED_FAULTS - 1}" if len(faults) > _COUNTED_FAULTS else str(len(rest))
    lines = ", ".join(str(other) for other, _ in rest[:_SHOWN_FAULTS]) + (", ..." if len(rest) > _SHOWN_FAULTS else "")
    return f"{_line(name, number)}: {reason}. Wrong lines besides this one: {count} ({lines})"


def _line(name: str, number: int) -> str:
    return f"{name}, line {number}"


def _line_at(text: bytes, position: int, name: str) -> str:
    return _line(name, text.count(b"\n", 0, position) + 1)
