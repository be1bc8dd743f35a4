"""List a checkpoint's files with size and SHA-256. The manifest is written last and contains a hash of itself.

{"manifest": {"format": 1, "step": 120, "world_size": 4, "files": {"common.safetensors": {"bytes": ..., "sha256": ...}, ...}},
 "sha256": of the text of the object "manifest"}
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMATS = (1, 2)
"""1: rank 0 has written the common state; 2: several ranks have, a part each."""
NAME = "MANIFEST.json"
COMMON = "common"
"""Stem of the files of the common state: `common`, and of further parts `common-00001`."""
_READ_BYTES = 2**20
MOST_BYTES = 2**26
"""Longest manifest that is read: of a hundred thousand ranks. A sparse file of gigabytes costs its author nothing."""


class Damaged(Exception):
    """A file differs from what was written. The message begins with its name."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    world_size: int
    files: dict[str, FileRecord]

    @property
    def format(self) -> int:
        return 2 if any(name.startswith(f"{COMMON}-") for name in self.files) else 1

    def to_text(self) -> str:
        body = {"format": self.format, **asdict(self)}
        return json.dumps({"manifest": body, "sha256": _digest_of(body)}, indent=1, sort_keys=True) + "\n"


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest; raise Damaged unless every byte is as it was written."""
    try:
        raw = _read_start(folder / NAME)
    except OSError as error:
        raise Damaged(f"{NAME} cannot be read: {error.strerror}") from None
    try:
        content = json.loads(raw)
        body = content["manifest"]
        intact = content["sha256"] == _digest_of(body)
        files = {name: FileRecord(int(entry["bytes"]), str(entry["sha256"])) for name, entry in body["files"].items()}
        manifest = Manifest(step=int(body["step"]), world_size=int(body["world_size"]), files=files)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Damaged(f"{NAME} is not a manifest") from None
    if body.get("format") not in FORMATS and intact:
        raise Damaged(f"{NAME} has format {body.get('format')!r}; this version reads formats {FORMATS[0]} to {FORMATS[-1]}")
    # Compare with the text that would be written: a changed space counts as damage too.
    if not intact or raw != manifest.to_text().encode():
        raise Damaged(f"{NAME} is damaged: its checksum does not match")
    if any(os.path.basename(name) != name or name in ("", ".", "..") for name in files):
        raise Damaged(f"{NAME} names a file outside its folder")
    return manifest


def _read_start(path: Path) -> bytes:
    """Read a plain file of at most `MOST_BYTES`."""
    _refuse_special(path)
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise Damaged(f"{path.name} has more than {MOST_BYTES} bytes")
    return raw


def is_common(name: str) -> bool:
    """Return whether a file of this name holds a part of the common state."""
    return name.partition(".")[0].partition("-")[0] == COMMON


def record_of(path: Path) -> FileRecord:
    """Read a file back and return its size and hash."""
    hasher, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return FileRecord(size, hasher.hexdigest())


def _refuse_special(path: Path) -> None:
    """Raise unless it is a plain file: a link may point anywhere, and reading a pipe may never end."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise Damaged(f"{path.name} is not a plain file")


def verify(folder: Path, manifest: Manifest, name: str) -> None:
    """Raise Damaged, naming the file, unless every byte of it is as the manifest says."""
    check_size(folder, manifest, name)
    expected = manifest.files[name]
    try:
        record = record_of(folder / name)
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None
    if record != expected:
        raise Damaged(f"{name} is damaged: its checksum does not match")


def check_size(folder: Path, manifest: Manifest, name: str) -> None:
    """Raise Damaged unless the file is there, with the size that the manifest says; its bytes are not read."""
    expected, path = manifest.files[name], folder / name
    try:
        size = path.lstat().st_size
        _refuse_special(path)
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None
    if size != expected.bytes:
        raise Damaged(f"{name} has {size} bytes instead of {expected.bytes}")
