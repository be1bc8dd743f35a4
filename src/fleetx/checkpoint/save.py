"""Save a checkpoint from all ranks: written to a temporary folder, then renamed, so that it is complete or absent.

take      every rank encodes its objects; an error on any rank is raised on all before a file is written
agree     fingerprints are compared: state that is equal on all ranks is written by rank 0, the rest by each rank
prepare   rank 0 checks the free space and makes the temporary folder; every rank must see it
write     every rank writes, syncs and hashes its files
commit    rank 0 writes the manifest, syncs, renames the folder and deletes old checkpoints

Each stage ends with an exchange of errors, so that all ranks continue or all raise. A kill at any time leaves the complete
folders as they were. With `async_save` the last three stages run in a thread, over a process group of its own.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..config.text import binary
from ..dist.agree import Failures, run_and_share, run_on_first
from ..dist.comm import Comm
from ..dist.own_files import sync_folder
from ..errors import CheckpointError
from . import folder
from .folder import write_tensors
from .hashes import COMMON, FileRecord, Manifest, record_of
from .hashes import NAME as MANIFEST
from .snapshot import Share, Snapshot, without_aliases
from .writer import become_writer, require_writer

SPARE_BYTES = 2**16
"""Bytes reserved for the manifest and the file system's metadata."""
RETRY_SECONDS = (0.5, 2.0)
"""Pauses before each further attempt, where storage has failed in a way that may pass."""
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
PASSING = frozenset((errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ENOLINK, errno.ECONNRESET))
_OS_CODE = re.compile(r"\bcode: (\d+)")


def share_name(rank: int | None, *, shard: int = 0) -> str:
    """Return the file name, without suffix, of one rank's state, or of the common state (None): its first or a further part."""
    if rank is not None:
        return f"rank-{rank:05d}"
    return f"{COMMON}-{shard:05d}" if shard else COMMON


def write_checkpoint(share: Share, directory: Path, *, step: int, keep: int, comm: Comm, warns: bool = False) -> Path:
    """Write a checkpoint and return its path. Every rank calls it; all raise or none.

    A full disk is answered by deleting checkpoints that this save would delete anyway, storage that may come back by waiting.
    `warns`: whether the caller goes on where storage has failed; the same on all ranks, or they would part."""
    ranks = comm.gather_json([share.nbytes(), step, warns])
    if any(theirs != step for _, theirs, _ in ranks):
        raise CheckpointError(
            f"the ranks save different steps: {[theirs for _, theirs, _ in ranks]}. Count updates, on every rank."
        )
    if len({theirs for *_, theirs in ranks}) > 1:
        raise CheckpointError("the ranks give different values of on_save_error. Give the same on every rank.")
    needed = sum(nbytes for nbytes, *_ in ranks)
    pauses, has_made_room = list(RETRY_SECONDS), False
    while True:
        try:
            return _write_once(share, directory, step=step, keep=keep, comm=comm, needed_bytes=needed)
        except CheckpointError as error:  # every rank is here, with the same error
            code = error.storage_code
            if code in FULL and not has_made_room:
                has_made_room = True
                if not on_first(comm, lambda: folder.make_room(directory, step=step, keep=keep)):
                    raise
            elif code in PASSING and pauses:
                time.sleep(pauses.pop(0))
            else:
                raise


def _write_once(share: Share, directory: Path, *, step: int, keep: int, comm: Comm, needed_bytes: int) -> Path:
    aside = directory / on_first(comm, lambda: _prepare(directory, step, needed_bytes, keep))
    records = _write_shares(comm, share, aside)
    name = on_first(comm, lambda: _commit(aside, directory, records, step=step, world_size=comm.size, keep=keep))
    return directory / name


# --- rank 0 alone, and every rank ---------------------------------------------------------------------------------------


def on_first(comm: Comm, action: Callable[[], str | None]) -> str:
    """Run on rank 0; return its result, or raise its error, on every rank."""
    return str(run_on_first(comm, action, report=lambda error: _reported(0, error), fails=_error_of) or "")


def _write_shares(comm: Comm, share: Share, aside: Path) -> dict[str, FileRecord]:
    """Write this rank's files and return the records of all, or delete the temporary folder and raise on every rank."""

    def fails(failures: Failures) -> CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        return _error_of(failures)

    _, ranks = run_and_share(
        comm,
        lambda: _write_share(share, aside, rank=comm.rank),
        lambda records: {name: [record.bytes, record.sha256] for name, record in records.items()},
        report=lambda error: _reported(comm.rank, error),
        fails=fails,
    )
    return {name: FileRecord(*record) for files in ranks for name, record in files.items()}


def _reported(rank: int, error: Exception) -> list[str | int | None]:
    """Return the text of an error and its number (None: not storage's), as they travel to the other ranks."""
    if isinstance(error, CheckpointError):
        return [str(error), error.storage_code]
    is_storage = isinstance(error, (OSError, SafetensorError))
    text = f"rank {rank} could not write: {'' if is_storage else type(error).__name__ + ': '}{error}"
    return [text, _code_of(error) if is_storage else None]


def _code_of(error: Exception) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    found = _OS_CODE.search(str(error))  # safetensors tells the system's error in its text
    return int(found[1]) if found else 0


def _error_of(failures: Failures) -> CheckpointError:
    """Make the same error on all ranks, with the number of storage's error if nothing else has failed on any."""
    codes = [code for _, code in failures.by_rank.values()]
    unlike = [code for code in codes if code not in FULL | PASSING]
    one = None if None in codes else unlike[0] if unlike else next((code for code in codes if code in FULL), codes[0])
    return _error("; ".join(dict.fromkeys(text for text, _ in failures.by_rank.values())), one)


def _error(text: str, storage_code: int | None) -> CheckpointError:
    error = CheckpointError(text)
    error.storage_code = storage_code
    return error


# --- prepare, write, commit ---------------------------------------------------------------------------------------------


def _prepare(directory: Path, step: int, needed_bytes: int, keep: int) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    become_writer(directory)
    folder.clear_leftovers(directory)
    needed_bytes += SPARE_BYTES
    free_bytes, deleted = shutil.disk_usage(directory).free, ""
    if free_bytes < needed_bytes <= free_bytes + folder.spare_bytes(directory, step=step, keep=keep):
        deleted = folder.make_room(directory, step=step, keep=keep)
        free_bytes = shutil.disk_usage(directory).free
    if needed_bytes > free_bytes:
        others = f", and {deleted} was deleted to make room" if deleted else "; the checkpoints that are there are untouched"
        raise _error(
            f"no room for the checkpoint: it needs {binary(needed_bytes)}, {directory} has {binary(free_bytes)}. "
            f"Nothing was written{others}.",
            0,
        )
    name = folder.unfinished_name(step)
    (directory / name).mkdir()
    return name


def _write_share(share: Share, aside: Path, *, rank: int) -> dict[str, FileRecord]:
    if not aside.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {aside}, which rank 0 has just made. Checkpoints must lie on storage that all nodes share."
        )
    records: dict[str, FileRecord] = {}
    for part, name in ((share.common, share_name(None, shard=rank)), (share.own, share_name(rank))):
        if part is not None:
            records |= _write_part(part, aside, name)
    sync_folder(aside)
    return records


def _write_part(part: Snapshot, aside: Path, name: str) -> dict[str, FileRecord]:
    tensors, tree = aside / f"{name}.safetensors", aside / f"{name}.json"
    folder.write_tensors(tensors, without_aliases(part.tensors))
    folder.write_text(tree, json.dumps({"objects": part.objects, "tensors": sorted(part.tensors)}))
    return {path.name: record_of(path) for path in (tensors, tree)}


def _commit(aside: Path, directory: Path, records: dict[str, FileRecord], *, step: int, world_size: int, keep: int) -> str:
    try:
        folder.write_text(aside / MANIFEST, Manifest(step, world_size, records).to_text())
        sync_folder(aside)
        require_writer(directory)
        name = folder.free_name(directory, step)
        os.rename(aside, directory / name)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(directory)
    folder.keep_newest(directory, keep, saved=name)
    return name


# --- in the background --------------------------------------------------------------------------------------------------


@final
class Saving:
    """A running or finished save. `wait()` returns the path of the complete checkpoint, or raises its error."""

    def __init__(self, write: Callable[[], Path], *, in_background: bool, warns: bool = False) -> None:
        self._write = write
        self._path: Path | None = None
        self._error: Exception | None = None
        self.error: Exception | None = None
        """Why nothing was written, once that is known; None: it was, or is still being written."""
        self.warns = warns
        """Whether a failure of storage is a warning, and the run goes on."""
        # Not a daemon: a script that ends right after its last save must not cut it short.
        self._thread = threading.Thread(target=self._run, name="fleetx checkpoint") if in_background else None
        if self._thread is not None:
            self._thread.start()
            return
        try:
            self._path = write()
        except CheckpointError as error:
            self.error = error
            if not warns or error.storage_code is None:
                raise

    def _run(self) -> None:
        try:
            self._path = self._write()
        except Exception as error:
            self._error = self.error = error
        finally:
            del self._write  # releases the copied state and the background group

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def take_error(self) -> Exception | None:
        """Wait, then return the error once: None if there was none, or if it was returned before."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        return error

    def wait(self) -> Path:
        error = self.take_error()
        if error is not None:
            raise error
        if self._path is None:
            raise CheckpointError("this checkpoint could not be written; the error was raised before.") from self.error
        return self._path


# --- the model alone ----------------------------------------------------------------------------------------------------
# One safetensors file with the user's own keys, which plain torch loads:
# state = safetensors.torch.load_file("model.safetensors")
# model = MyModel()
# model.load_state_dict(state)


def plain_tensors(model: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the state dict to the CPU, each tensor with its own memory: tied weights are written under both names."""
    every = {**model.state_dict(), **whole}
    state = {name.replace("_orig_mod.", ""): value for name, value in every.items()}  # prefix added by torch.compile
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(f"`{others[0]}` in the model's state dict is not a tensor; a safetensors file cannot hold it.")
    return {name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, t in state.items()}


def write_model(model: nn.Module, path: Path, whole: Mapping[str, Tensor] | None = None) -> None:
    """Write to a temporary folder, sync, rename: an older file at `path` stays until the new one is complete. `whole`: weights
    that were gathered, in the place of this rank's part of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A temporary folder per file name: safetensors makes a temporary file beside its target, which a kill would leave behind.
    prefix = f".writing-{hashlib.sha256(path.name.encode()).hexdigest()[:16]}-"
    for entry in list(os.scandir(path.parent)):
        if entry.name.startswith(prefix):
            shutil.rmtree(entry.path, ignore_errors=True)
    aside = path.with_name(prefix + uuid.uuid4().hex)
    aside.mkdir()
    try:
        write_tensors(aside / "model", plain_tensors(model, whole or {}), metadata={"format": "pt"})
        if path.is_file():
            shutil.copymode(path, aside / "model")
        os.replace(aside / "model", path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(path.parent)
