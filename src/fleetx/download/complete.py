"""What is already there and verified: .fleetx-complete.json, by the path of each file.

Size and time of change are compared with it, not the bytes: eight ranks that each hash 150 GB would take longer than the
download. Whoever suspects the disk deletes this note: every file is then hashed again.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import DataError
from .folder import below, read_whole, write_whole
from .manifest import Entry
from .names import RESERVED

NAME = f"{RESERVED}complete.json"
NOTE_BYTES = 256 * 2**20
KEPT_NAMES = 1000


@dataclass(frozen=True, slots=True)
class Unpacked:
    files: int
    bytes: int
    names: list[str]
    """What lies at the top (the first thousand of them): they must still be there. All million files are not asked for."""


@dataclass(frozen=True, slots=True)
class Record:
    sha256: str
    size: int
    mtime_ns: int
    unpacked: Unpacked | None = None


def read_records(root: int) -> dict[str, Record]:
    """A damaged note counts as none: everything is then looked at again."""
    try:
        content = json.loads(read_whole(root, NAME, NOTE_BYTES) or "{}")
        return {str(path): _record(row) for path, row in content.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _record(row: dict[str, Any]) -> Record:
    unpacked = row["unpacked"]
    if unpacked is not None:
        unpacked = Unpacked(int(unpacked["files"]), int(unpacked["bytes"]), [str(name) for name in unpacked["names"]])
    return Record(str(row["sha256"]), int(row["size"]), int(row["mtime_ns"]), unpacked)


def write_records(root: int, records: dict[str, Record]) -> None:
    write_whole(root, NAME, json.dumps({path: asdict(record) for path, record in records.items()}, indent=1))


def record_of(folder: int, entry: Entry, unpacked: Unpacked | None = None) -> Record:
    found = os.stat(entry.parts[-1], dir_fd=folder)
    return Record(entry.sha256, found.st_size, found.st_mtime_ns, unpacked)


def is_there(root: int, entry: Entry, record: Record | None) -> bool:
    """The file as it was when it was verified."""
    if record is None or record.sha256 != entry.sha256:
        return False
    try:
        with below(root, entry.parts[:-1]) as folder:
            found = os.stat(entry.parts[-1], dir_fd=folder)
    except (OSError, DataError):
        return False
    return stat.S_ISREG(found.st_mode) and (found.st_size, found.st_mtime_ns) == (entry.size, record.mtime_ns)


def is_unpacked(root: int, entry: Entry, record: Record | None) -> bool:
    if record is None or record.unpacked is None or record.sha256 != entry.sha256:
        return False
    try:
        with below(root, entry.parts[:-1]) as folder:
            for name in record.unpacked.names:
                os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (OSError, DataError, ValueError):
        return False
    return True
