"""Cache arrays on disk: computed once per node, and mapped into memory by every process that uses them.

    CACHE/KEY/header.json      types and hashes of the arrays, facts about them, and the header's own hash
    CACHE/KEY/tokens.bin       one file per array
    CACHE/KEY/checked-4f1c...  of one node: the state of the files (size, times, inode) when all their bytes were hashed
    CACHE/KEY.lock             held by the process that builds; the others wait and then map what it wrote

A folder is written under another name, synced and renamed, so that it is complete or absent. One whose header or files have
changed is built again. Every byte is hashed by one process of a node, once for each start of the machine; the others see that the
files are still those. Only damaged folders are ever deleted; the cache may be emptied at any time.
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
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...config import log
from ...dist.file_lock import LocksMissingError, lock_aloud
from ...dist.machine import boot_name
from ...dist.own_files import replace_file, sync_folder
from ...errors import ConfigError, DataError, warn_user

# --- The lock: one process of a node at a time; the kernel releases it when its holder dies -----------------------------

_FIRST_WORD_S, _NEXT_WORD_S = 2.0, 60.0


@contextlib.contextmanager
def node_lock(path: Path, *, waiting_for: str) -> Iterator[None]:
    """Hold the lock of the node; after two seconds of waiting, say on stderr for what."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:  # perhaps it belongs to another user, or is a link
        raise DataError(f"{path} cannot be opened to lock it ({error.strerror}). Pass another cache_dir=FOLDER.") from None
    try:
        _acquire(handle, path, waiting_for)
        yield
    finally:
        os.close(handle)  # releases the lock


def _acquire(handle: int, path: Path, waiting_for: str) -> None:
    def say(waited_s: float) -> None:
        text = f"fleetx: waiting for {waiting_for}, prepared by another process ({waited_s:.0f} s so far)."
        log.say(text, stream=sys.stderr)

    try:
        lock_aloud(handle, say, first_word_s=_FIRST_WORD_S, next_word_s=_NEXT_WORD_S)
    except LocksMissingError as error:
        # Without locks several may build the same: slower, and still right, since each renames a whole folder.
        warn_user(f"{path.parent} is on a file system without locks ({error.strerror}).")


# --- The arrays -----------------------------------------------------------------------------------------------------------

Array: TypeAlias = npt.NDArray[Any]

_FORMAT = 2
_READ_BYTES = 2**20
_SETTLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Cached:
    """Result of a build: read-only arrays backed by files, and small facts."""

    folder: Path
    arrays: dict[str, Array]
    facts: dict[str, Any]
    digest: str  # sha256 of the header, which covers arrays and facts


class ArrayWriter:
    """Append to one-dimensional arrays on disk, so that a corpus larger than memory can be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._hashers: dict[str, Any] = {}
        self._files = contextlib.ExitStack()
        self._handles: dict[str, Any] = {}

    def append(self, name: str, values: Array) -> None:
        if name not in self._handles:
            self._handles[name] = self._files.enter_context(open(self.folder / _file(name), "xb"))
            self._dtypes[name], self._hashers[name] = values.dtype, hashlib.sha256()
        data = np.ascontiguousarray(values, dtype=self._dtypes[name]).data
        self._handles[name].write(data)
        self._hashers[name].update(data)

    def close(self) -> dict[str, Any]:
        """Sync the files; return the description of every array, for the header."""
        for handle in self._handles.values():
            handle.flush()
            os.fsync(handle.fileno())
        self._files.close()
        return {name: {"dtype": dtype.str, "sha256": self._hashers[name].hexdigest()} for name, dtype in self._dtypes.items()}

    def abandon(self) -> None:
        """Close the files without syncing them."""
        self._files.close()


Build: TypeAlias = Callable[[ArrayWriter], dict[str, Any]]
"""A function that appends the arrays and returns the facts: values that JSON can hold."""


def cache_key(**parts: Any) -> str:
    """Hash everything that a build depends on into one name."""
    return hashlib.sha256(json.dumps({"format": _FORMAT, **parts}, sort_keys=True).encode()).hexdigest()


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Choose the folder of token arrays: the one given, or one below the user's cache; in /tmp where that cannot be written."""
    if cache_dir is not None:
        folder = Path(os.path.abspath(cache_dir))
        if (reason := _unusable(folder)) is not None:
            raise ConfigError(f"cache_dir = {str(cache_dir)!r} cannot be written ({reason}). Name a writable folder.")
        return folder
    folder = _home_cache() / "fleetx" / "text"
    if (reason := _unusable(folder, mode=0o700)) is None:  # tokens of private text stay private
        return folder
    spare = Path(tempfile.gettempdir()) / f"fleetx-{os.getuid()}" / "text"
    if (spare_reason := _foreign(spare.parent) or _unusable(spare)) is not None:
        raise ConfigError(
            f"neither {folder} ({reason}) nor {spare} ({spare_reason}) can hold token arrays. Pass cache_dir=FOLDER."
        )
    warn_user(
        f"{folder} cannot be written ({reason}): token arrays go to {spare}, which a restart may empty. Pass "
        f"cache_dir=FOLDER to keep them elsewhere.",
    )
    return spare


def cached(folder: Path, key: str, build: Build, *, what: str) -> Cached:
    """Map the arrays of this key; if they are missing, one process of the node builds them while the others wait."""
    home = folder / key
    if (found := _open(home)) is not None:
        return found
    with node_lock(folder / f"{key}.lock", waiting_for=what):
        if (found := _open(home, reads_all=True, complain=True)) is not None:
            return found
        try:
            _write(home, build)
        except OSError as error:
            if (found := _open(home, reads_all=True)) is not None:
                return found  # on a file system without locks another process was faster
            raise DataError(
                f"{what} cannot be written to {folder}: {error.strerror or error}. Pass another cache_dir=FOLDER."
            ) from error
        if (found := _open(home, reads_all=True)) is None:
            raise DataError(f"{home} was written and cannot be read back: check that disk, or pass another cache_dir=FOLDER.")
        return found


def _write(home: Path, build: Build) -> None:
    mine = f".{home.name}-{socket.gethostname()}-"
    for left in home.parent.glob(f"{mine}*"):  # left by a killed process of this node: a living one would hold the lock
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
        sync_folder(aside)
        if home.exists():  # damaged; processes that still map it keep their pages
            damaged = home.rename(home.parent / f"{mine}damaged-{uuid.uuid4().hex}")
            shutil.rmtree(damaged, ignore_errors=True)
        aside.rename(home)
        sync_folder(home.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _open(home: Path, *, reads_all: bool = False, complain: bool = False) -> Cached | None:
    """Map the arrays; None where anything is missing or damaged. Without `reads_all` also None unless this node has hashed
    every byte since it was started, and the files are those that it has read."""
    if not home.is_dir():
        return None
    try:
        if _is_like_tmp(home.parent) and home.lstat().st_uid != os.getuid():
            raise ValueError("another user put them into a folder that all users may write to")
        header = json.loads((home / "header.json").read_text(encoding="utf-8"))
        body = header["body"]
        if header["sha256"] != _hash_of(body):
            raise ValueError("its header has changed since it was written")
        state = _state_of(home, body["arrays"])
        if _read_mark(home) != state:
            if not reads_all:
                return None
            _let_settle(state)
            for name, described in body["arrays"].items():
                _verify(home / _file(name), described["sha256"])
            _write_mark(home, state)
        arrays = {name: _map(home / _file(name), described["dtype"]) for name, described in body["arrays"].items()}
        return Cached(home, arrays, body["facts"], header["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if complain:
            warn_user(f"the cached arrays in {home} are damaged ({error}): they are built again.")
        return None


def _file(name: str) -> str:
    return name if "." in name else f"{name}.bin"


def _map(path: Path, dtype: str) -> Array:
    if np.dtype(dtype).kind not in "uib":
        raise ValueError(f"{path.name} holds no whole numbers")
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=np.dtype(dtype))  # an empty file cannot be mapped
    return np.memmap(path, dtype=np.dtype(dtype), mode="r")


def _verify(path: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{path.name} has changed since it was written")


# --- which files this node has read in full -----------------------------------------------------------------------------


def _state_of(home: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return what changes with every write to the files: the kernel sets the last number, and no program can set it back."""
    stats = {name: (home / _file(name)).stat() for name in sorted(names)}
    files = {name: [s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats.items()}
    return {"start": boot_name(), "files": files}


def _let_settle(state: Mapping[str, Any]) -> None:
    """Wait until a later change would have another time: the kernel dates files by a clock that ticks every few milliseconds."""
    youngest_s = max((times[-1] / 1e9 for times in state["files"].values()), default=0.0)
    time.sleep(min(max(youngest_s + _SETTLE_S - time.time(), 0.0), _SETTLE_S))


def _mark(home: Path) -> Path:
    return home / f"checked-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:16]}"


def _read_mark(home: Path) -> Any:
    try:
        return json.loads(_mark(home).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _write_mark(home: Path, state: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the next process reads all again
        replace_file(_mark(home), json.dumps(state).encode(), mode=0o666)


def _hash_of(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _home_cache() -> Path:
    wished = os.environ.get("XDG_CACHE_HOME", "")
    return Path(wished) if os.path.isabs(wished) else Path(os.path.expanduser("~")) / ".cache"


def _unusable(folder: Path, *, mode: int = 0o777) -> str | None:
    """Return why the folder cannot be written, found by writing; None if it can."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _foreign(folder: Path) -> str | None:
    """Return why a folder in /tmp is not safe; None if it is. Another user could have created it, to choose our data."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        entry = folder.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.getuid() and not entry.st_mode & 0o077:
        return None
    return "it belongs to another user, or is open to others"


def _is_like_tmp(folder: Path) -> bool:
    """Check for /tmp's permissions: all users may create files, and delete only their own."""
    return folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH | stat.S_ISVTX
