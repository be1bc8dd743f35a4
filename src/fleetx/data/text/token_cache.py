"""Arrays computed once per node and mapped into memory by every process that wants them.

    CACHE/KEY/header.json      what the arrays are, their sizes and fingerprints, and the header's own hash
    CACHE/KEY/tokens.bin       one file per array
    CACHE/KEY.lock             held by the process that builds; the others wait and then map what it wrote

A folder is written aside, made durable and renamed, so that it is there whole or not at all. One whose header or files are not
what was written is built again. Nothing is ever deleted from the cache but such folders: it may be emptied at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...config import log
from ...dist.file_lock import LocksMissingError, lock_aloud
from ...errors import ConfigError, DataError, warn_user

# --- One process of a node at a time. A lock of the kernel: whoever dies holding it lets it go ------------------------

_FIRST_WORD_S, _NEXT_WORD_S = 2.0, 60.0


@contextlib.contextmanager
def node_lock(path: Path, *, waiting_for: str) -> Iterator[None]:
    """Hold the lock; say on stderr what is waited for when that takes more than a moment."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:  # made by another user, perhaps, or a link that leads who knows where
        raise DataError(f"{path} cannot be opened to lock it ({error.strerror}). Pass another cache_dir=FOLDER.") from None
    try:
        _acquire(handle, path, waiting_for)
        yield
    finally:
        os.close(handle)  # lets go


def _acquire(handle: int, path: Path, waiting_for: str) -> None:
    def say(waited_s: float) -> None:
        text = f"fleetx: waiting for {waiting_for}, prepared by another process ({waited_s:.0f} s so far)."
        log.say(text, stream=sys.stderr)

    try:
        lock_aloud(handle, say, first_word_s=_FIRST_WORD_S, next_word_s=_NEXT_WORD_S)
    except LocksMissingError as error:
        # Without locks several may build the same: slower, and still right, since each renames a whole folder.
        warn_user(f"{path.parent} is on a file system without locks ({error.strerror}).")


# ----------------------------------------------------------------------------------------------------------------------

Array: TypeAlias = npt.NDArray[Any]

_EDGE_BYTES = 2**20  # fingerprinted at each end of a file: all of a small one, and a moment's work for one of many gigabytes


@dataclass(frozen=True, slots=True)
class Cached:
    """What a build left behind: read-only arrays backed by files, and small facts."""

    folder: Path
    arrays: dict[str, Array]
    facts: dict[str, Any]
    digest: str  # of all that


class ArrayWriter:
    """Appends to one-dimensional arrays on disk, so that a corpus larger than memory can be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._files = contextlib.ExitStack()
        self._handles: dict[str, Any] = {}

    def append(self, name: str, values: Array) -> None:
        if name not in self._handles:
            self._handles[name] = self._files.enter_context(open(self.folder / _file(name), "xb"))
            self._dtypes[name] = values.dtype
        self._handles[name].write(np.ascontiguousarray(values, dtype=self._dtypes[name]).data)

    def close(self) -> dict[str, Any]:
        """The description of every array, for the header."""
        for handle in self._handles.values():
            handle.flush()
            os.fsync(handle.fileno())
        self._files.close()
        return {
            name: {"dtype": dtype.str, "mark": _fingerprint(self.folder / _file(name))} for name, dtype in self._dtypes.items()
        }

    def abandon(self) -> None:
        self._files.close()


Build: TypeAlias = Callable[[ArrayWriter], dict[str, Any]]
"""Appends the arrays and returns the facts: values that JSON can hold."""


def cache_key(**parts: Any) -> str:
    """One name for everything that a build depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where token arrays lie: the folder asked for, or one below the user's cache; in /tmp where that cannot be written."""
    if cache_dir is not None:
        folder = Path(os.path.abspath(cache_dir))
        if (reason := _unusable(folder)) is not None:
            raise ConfigError(f"cache_dir = {str(cache_dir)!r} cannot be written ({reason}). Name a folder that can.")
        return folder
    folder = _home_cache() / "fleetx" / "text"
    if (reason := _unusable(folder, mode=0o700)) is None:  # what was private text stays private as tokens
        return folder
    spare = Path(tempfile.gettempdir()) / f"fleetx-{os.getuid()}" / "text"
    if (spare_reason := _foreign(spare.parent) or _unusable(spare)) is not None:
        raise ConfigError(
            f"neither {folder} ({reason}) nor {spare} ({spare_reason}) can hold token arrays. Pass cache_dir=FOLDER."
        )
    warn_user(
        f"{folder} cannot be written ({reason}): token arrays go to {spare}, which may not outlive a restart. Pass "
        f"cache_dir=FOLDER to keep them elsewhere.",
    )
    return spare


def cached(folder: Path, key: str, build: Build, *, what: str) -> Cached:
    """The arrays of this key: mapped if they are there, built if not, by one process of the node while the others wait."""
    home = folder / key
    if (found := _open(home)) is not None:
        return found
    with node_lock(folder / f"{key}.lock", waiting_for=what):
        if (found := _open(home, complain=True)) is not None:
            return found
        try:
            _write(home, build)
        except OSError as error:
            if (found := _open(home)) is not None:
                return found  # on a file system without locks another process has come first
            raise DataError(
                f"{what} cannot be written to {folder}: {error.strerror or error}. Pass another cache_dir=FOLDER."
            ) from error
    if (found := _open(home)) is None:
        raise DataError(f"{home} was written and cannot be read back: look at that disk, or pass another cache_dir=FOLDER.")
    return found


def _write(home: Path, build: Build) -> None:
    mine = f".{home.name}-{socket.gethostname()}-"
    for left in home.parent.glob(f"{mine}*"):  # by a process of this node that was killed: we hold the lock, so it is gone
        shutil.rmtree(left, ignore_errors=True)
    aside = home.parent / f"{mine}{uuid.uuid4().hex}"
    aside.mkdir()
    try:
        writer = ArrayWriter(aside)
        try:
            facts = build(writer)
            body = {"facts": facts, "arrays": writer.close()}
        finally:
            writer.abandon()
        with open(aside / "header.json", "x", encoding="utf-8") as file:
            json.dump({"body": body, "sha256": _hash_of(body)}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(aside)
        if home.exists():  # damaged; processes that still map it keep their pages
            damaged = home.rename(home.parent / f"{mine}damaged-{uuid.uuid4().hex}")
            shutil.rmtree(damaged, ignore_errors=True)
        aside.rename(home)
        _sync_folder(home.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _open(home: Path, *, complain: bool = False) -> Cached | None:
    """The arrays if every file is what was written, else nothing."""
    if not home.is_dir():
        return None
    try:
        if _is_like_tmp(home.parent) and home.lstat().st_uid != os.getuid():
            raise ValueError("they were put by somebody else into a folder that everybody may write to")
        header = json.loads((home / "header.json").read_text(encoding="utf-8"))
        body = header["body"]
        if header["sha256"] != _hash_of(body):
            raise ValueError("its header is not what was written")
        arrays = {name: _map(home / _file(name), **described) for name, described in body["arrays"].items()}
        return Cached(home, arrays, body["facts"], header["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if complain:
            warn_user(f"the cached arrays in {home} are damaged ({error}): they are built again.")
        return None


def _file(name: str) -> str:
    return name if "." in name else f"{name}.bin"


def _map(path: Path, *, dtype: str, mark: str) -> Array:
    if _fingerprint(path) != mark or np.dtype(dtype).kind not in "uib":
        raise ValueError(f"{path.name} is not what was written")
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=np.dtype(dtype))  # nothing cannot be mapped
    return np.memmap(path, dtype=np.dtype(dtype), mode="r")


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        file.seek(max(file.tell(), size - _EDGE_BYTES))
        digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()


def _hash_of(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _home_cache() -> Path:
    wished = os.environ.get("XDG_CACHE_HOME", "")
    return Path(wished) if os.path.isabs(wished) else Path(os.path.expanduser("~")) / ".cache"


def _unusable(folder: Path, *, mode: int = 0o777) -> str | None:
    """Why nothing can be written there, found by writing."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _foreign(folder: Path) -> str | None:
    """/tmp is everybody's: a folder that another user made there first would let them choose our data."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        entry = folder.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.getuid() and not entry.st_mode & 0o077:
        return None
    return "it belongs to somebody else, or is open to others"


def _is_like_tmp(folder: Path) -> bool:
    """Everybody may put something into it, and take away only their own."""
    return folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH | stat.S_ISVTX


def _sync_folder(path: Path) -> None:
    """Make names durable: a file's own fsync does not cover the folder that lists it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
