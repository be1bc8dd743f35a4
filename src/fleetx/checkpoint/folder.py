"""Names and durable writes of checkpoint folders: one folder per step, complete or absent.

runs/a/step-0000000120        complete; step-0000000120.1 is a later save of the same step
runs/a/.saving-120-4f1c...    being written, or left behind by a killed run
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
    """Return the names of complete folders, newest first by step and not by time: clocks jump."""
    complete = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            match = _COMPLETE.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                complete.append((int(match[1]), int(match[2] or 0), entry.name))
    return [name for _, _, name in sorted(complete, reverse=True)]


def unfinished_name(step: int) -> str:
    return f".saving-{step}-{uuid.uuid4().hex}"


def free_name(directory: Path, step: int) -> str:
    """Return an unused name: replacing a complete folder takes two renames, and a kill between them would leave neither."""
    matches = [_COMPLETE.fullmatch(entry.name) for entry in os.scandir(directory)]
    taken = [int(match[2] or 0) for match in matches if match and int(match[1]) == step]
    # After the highest number, never in a gap: of two saves of one step the higher number must be the later one.
    return f"step-{step:010d}.{max(taken) + 1}" if taken else f"step-{step:010d}"


def step_of(name: str) -> int | None:
    match = _COMPLETE.fullmatch(name)
    return int(match[1]) if match else None


def clear_leftovers(directory: Path) -> None:
    """Delete the incomplete folders of killed runs. This run is the only one that writes to the directory (writer.py)."""
    for entry in list(os.scandir(directory)):
        if _UNFINISHED.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


def keep_newest(directory: Path, count: int, *, saved: str) -> None:
    """Keep the folder just saved and the `count - 1` before it; delete older ones.

    Folders of later steps do not count: a run resumed from before a damaged one would otherwise delete what it just saved.
    """
    names = newest_first(directory)
    for name in names[names.index(saved) + count :]:
        _remove(directory, name)


def make_room(directory: Path, *, step: int, keep: int) -> str:
    """Delete what a save of this step would delete once it is complete, but for one checkpoint; return the names."""
    removed = [name for name in _spare(directory, step=step, keep=keep) if _remove(directory, name)]
    return ", ".join(removed)


def spare_bytes(directory: Path, *, step: int, keep: int) -> int:
    """Return the size of what `make_room` would delete."""
    size = 0
    for name in _spare(directory, step=step, keep=keep):
        with contextlib.suppress(OSError):
            size += sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(directory / name))
    return size


def _spare(directory: Path, *, step: int, keep: int) -> list[str]:
    before = [name for name in newest_first(directory) if (step_of(name) or 0) <= step]
    return before[max(keep - 1, 1) :]


def _remove(directory: Path, name: str) -> bool:
    """Delete a folder. Failing to must not end the run."""
    doomed = directory / f".removing-{step_of(name)}-{uuid.uuid4().hex}"
    try:
        os.rename(directory / name, doomed)  # first: a half-deleted folder must not look like a checkpoint
    except OSError:
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of any new file: safetensors itself allows only this user to read it."""
    with open(path, "xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    save_file(dict(tensors), path, metadata=metadata)
    os.chmod(path, mode)
    sync_file(path)


def write_text(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
