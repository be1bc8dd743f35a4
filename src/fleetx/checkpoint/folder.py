"""Where checkpoints lie: one folder per step, complete or not there at all.

runs/a/step-0000000120        complete; step-0000000120.1 is a later one of the same step
runs/a/.saving-120-4f1c...    being written, or left by a run that was killed
runs/a/.removing-110-77b0...  being deleted
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_COMPLETE = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.(saving|removing)-\d+-[0-9a-f]{32}")


def newest_first(directory: Path) -> list[str]:
    """Complete folders by step, not by time: clocks jump."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            match = _COMPLETE.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append((int(match[1]), int(match[2] or 0), entry.name))
    return [name for _, _, name in sorted(found, reverse=True)]


def unfinished_name(step: int) -> str:
    return f".saving-{step}-{uuid.uuid4().hex}"


def free_name(directory: Path, step: int) -> str:
    """A complete folder is never replaced: while one was moved away for the other, a kill would leave neither."""
    matches = [_COMPLETE.fullmatch(entry.name) for entry in os.scandir(directory)]
    taken = [int(match[2] or 0) for match in matches if match and int(match[1]) == step]
    # Behind the last one, not in a gap: of two of one step the higher number is the later one.
    return f"step-{step:010d}.{max(taken) + 1}" if taken else f"step-{step:010d}"


def step_of(name: str) -> int | None:
    match = _COMPLETE.fullmatch(name)
    return int(match[1]) if match else None


def clear_leftovers(directory: Path) -> None:
    """What killed runs left half-written. One run at a time writes to a directory."""
    for entry in list(os.scandir(directory)):
        if _UNFINISHED.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


def keep_newest(directory: Path, count: int, *, saved: str) -> None:
    """Delete what is older than the `count` newest, counted from the one just saved.

    Folders of later steps do not count: a run that fell back behind a damaged one would delete what it has just saved.
    """
    names = newest_first(directory)
    for name in names[names.index(saved) + count :]:
        doomed = directory / f".removing-{step_of(name)}-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):  # an old one that cannot be deleted must not end the run
            os.rename(directory / name, doomed)  # first: a half-deleted folder must not look like a checkpoint
            shutil.rmtree(doomed, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Make names durable: a file's own fsync does not cover the folder that lists it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """With the rights that any new file gets: safetensors would let nobody but this user read it."""
    with open(path, "xb") as file:
        rights = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    save_file(dict(tensors), path, metadata=metadata)
    os.chmod(path, rights)
    sync_file(path)


def write_text(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
