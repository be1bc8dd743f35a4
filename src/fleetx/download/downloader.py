"""Download the files of a manifest into a folder, verified; one process of a node works while the others wait.

lock -> read the manifest -> room on the disk? -> each file: already there? else fetch and verify -> unpack -> record -> unlock

.fleetx-complete.json records what was verified, with size and time of change: hashing 150 GB again on each of eight ranks
would take longer than the download. Delete it to have every file hashed again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config.kinds import integer, number
from ..config.text import binary, decimal
from ..errors import ConfigError, DataError
from .fetch import RetryPolicy, fetch, fetch_small, has_right_bytes, refuse_folder
from .folder import RESERVED, below, opened, read_whole, write_whole
from .manifest import MAX_BYTES, NAMES, PART, Entry, parse_manifest
from .once_per_node import Turn, once
from .reporter import Reporter, reporting
from .transport import Address, BadAddress, parse_address
from .unpack import Unpacked, unpack
from .writer import Limits

RECORDS = f"{RESERVED}complete.json"
RECORDS_BYTES = 256 * 2**20
RECORD_EVERY_S = 10.0


class Downloader:
    """Download data to this node: `X.utils.Downloader().download("https://host/data/manifest.yaml", "./data")`.

    Examples:
        >>> downloader = X.utils.Downloader()
    """

    def __init__(
        self,
        *,
        retries: int = 5,
        timeout_seconds: float = 30.0,
        backoff_seconds: float = 0.5,
        max_unpacked_bytes: int = 2**40,
        max_files: int = 5_000_000,
        max_ratio: float = 200.0,
    ) -> None:
        integer(0).check("retries", retries)
        number(above=0).check("timeout_seconds", timeout_seconds)
        number(above=0).check("backoff_seconds", backoff_seconds)
        integer(1).check("max_unpacked_bytes", max_unpacked_bytes)
        integer(1).check("max_files", max_files)
        number(above=0).check("max_ratio", max_ratio)
        self._policy = RetryPolicy(retries, timeout_seconds, backoff_seconds)
        self._limits = Limits(max_unpacked_bytes, max_files, max_ratio)

    def download(self, manifest: str | os.PathLike[str], local_path: str | os.PathLike[str]) -> str:
        """Fetch every file of the manifest, verify it by SHA-256, unpack archives, and return the folder.

        Files of the manifest and of its archives replace others of the same name. Works before fleet.init() too.
        """
        origin = _find_manifest(manifest)
        path = os.path.expanduser(_text("local_path", local_path))
        request = hashlib.sha256(f"{_key(origin)} {self._limits}".encode("utf-8", "surrogateescape")).hexdigest()
        with reporting() as reporter, _errors_named(path):
            _make_folder(path)
            with opened(path) as root:
                work = _Work(root, os.path.realpath(path), origin, self._policy, self._limits, reporter)
                try:
                    once(root, request, work.run, reporter.line)
                except OSError as error:
                    # A finished data set on a read-only disk is fine: there is nothing to write.
                    if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not work.is_complete():
                        raise
        return path

    def download_from_bos(self, fs_yaml: str | os.PathLike[str], local_path: str | os.PathLike[str] = "./") -> str:
        """Call `download` under Fleet's name for it; `fs_yaml` is a manifest."""
        return self.download(fs_yaml, local_path)


class _Work:
    """One call of `download`, run by the process that holds the lock."""

    def __init__(
        self, root: int, root_path: str, origin: Address, policy: RetryPolicy, limits: Limits, reporter: Reporter
    ) -> None:
        self._root, self._root_path, self._origin = root, root_path, origin
        self._policy, self._limits, self._reporter = policy, limits, reporter
        self._records = read_records(root)
        self._recorded_at = time.monotonic()

    def run(self, turn: Turn) -> None:
        with _errors_named(self._root_path):
            self._run(turn)

    def _run(self, turn: Turn) -> None:
        self._records = read_records(self._root)  # again: another process may have written it while this one waited
        entries = self._entries()
        missing = [entry for entry in entries if not self._is_done(entry)]
        if not missing:
            return
        total = sum(entry.size for entry in entries)
        files = "1 file" if len(entries) == 1 else f"{len(entries)} files"
        self._reporter.line(f"{files}, {decimal(total)}, from {self._origin} into {self._root_path}")
        self._check_room(missing)
        kept = {entry.path for entry in entries}
        try:
            for entry in missing:
                with below(self._root, entry.parts[:-1], make=True) as folder:
                    self._fetch(entry, folder, turn)
                    if entry.unpack:
                        self._unpack(entry, folder, turn, kept)
                    self._record_if_due()
        except BaseException:
            with contextlib.suppress(OSError):  # perhaps a full disk: the first error is the one to raise
                write_records(self._root, self._records)
            raise
        write_records(self._root, self._records)

    def is_complete(self) -> bool:
        return all(self._is_done(entry) for entry in self._entries())

    def _entries(self) -> list[Entry]:
        return parse_manifest(fetch_small(self._origin, MAX_BYTES, self._policy, self._reporter.line), self._origin)

    def _is_done(self, entry: Entry) -> bool:
        record = self._records.get(entry.path)
        return is_unchanged(self._root, entry, record) and (not entry.unpack or is_unpacked(self._root, entry, record))

    def _check_room(self, missing: list[Entry]) -> None:
        """Refuse a full disk before the download. An archive needs at least its own size again, for what it unpacks to."""
        room = os.fstatvfs(self._root)
        free = room.f_bavail * room.f_frsize
        need = sum(self._bytes_to_come(entry) + (entry.size if entry.unpack else 0) for entry in missing)
        if need > free:
            raise DataError(
                f"{self._root_path} has {binary(free)} left; {binary(need)} are needed. Make room or choose another folder."
            )

    def _bytes_to_come(self, entry: Entry) -> int:
        name = entry.parts[-1]
        with contextlib.suppress(OSError, DataError), below(self._root, entry.parts[:-1]) as folder:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(name, dir_fd=folder).st_size == entry.size:
                    return 0
            return max(0, entry.size - os.stat(name + PART, dir_fd=folder).st_size)
        return entry.size

    def _fetch(self, entry: Entry, folder: int, turn: Turn) -> None:
        if is_unchanged(self._root, entry, self._records.get(entry.path)):
            return
        self._records.pop(entry.path, None)
        refuse_folder(folder, entry)
        received = self._received(entry, turn)
        if not has_right_bytes(folder, entry, lambda: self._reporter.begin(f"checking {entry.path}", entry.size), received):
            self._reporter.begin(f"downloading {entry.path}", entry.size)
            fetch(entry, folder, self._policy, self._reporter.line, received)
        self._records[entry.path] = record_of(folder, entry)

    def _unpack(self, entry: Entry, folder: int, turn: Turn, kept: set[str]) -> None:
        self._reporter.begin(f"unpacking {entry.path}", entry.size)
        unpacked = unpack(self._root, self._root_path, entry, self._limits, kept, self._received(entry, turn))
        self._records[entry.path] = record_of(folder, entry, unpacked)

    def _received(self, entry: Entry, turn: Turn) -> Callable[[int], None]:
        """Return a callback that shows the bytes of an entry to the user and to the waiting processes."""

        def received(count: int) -> None:
            self._reporter.received(count)
            turn.note(f"{entry.path}: {decimal(count)} of {decimal(entry.size)}")

        return received

    def _record_if_due(self) -> None:
        """Write the records every RECORD_EVERY_S: after each of a hundred thousand files it would be most of the work."""
        if time.monotonic() - self._recorded_at >= RECORD_EVERY_S:
            write_records(self._root, self._records)
            self._recorded_at = time.monotonic()


def _find_manifest(manifest: str | os.PathLike[str]) -> Address:
    """Find the manifest; in a folder it has one of the usual names."""
    text = _text("manifest", manifest)
    try:
        origin = parse_address(text) if isinstance(manifest, str) else Path(text)
    except BadAddress as error:
        raise ConfigError(f"manifest: {error}") from None
    if not isinstance(origin, Path) or not origin.is_dir():
        return origin
    names = [name for name in NAMES if (origin / name).exists()]
    if not names:
        raise DataError(f"the folder {origin} holds no manifest; it should be called {', '.join(NAMES[:-1])} or {NAMES[-1]}.")
    if len(names) > 1:
        raise DataError(f"the folder {origin} holds {' and '.join(names)}; name the one to use.")
    return origin / names[0]


def _key(origin: Address) -> str:
    return os.path.realpath(origin) if isinstance(origin, Path) else origin.url


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"local_path is {path!r}, where there is a file; name a folder.") from None


@contextlib.contextmanager
def _errors_named(path: str) -> Iterator[None]:
    """Turn an error of the disk (full, read-only, no permission) into a DataError that says where."""
    try:
        yield
    except OSError as error:
        name = f" ({error.filename})" if isinstance(error.filename, str) else ""
        raise DataError(f"{path} cannot be written to{name}: {error.strerror or error}.") from error


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} is a {type(value).__name__}; it must be a path or an address, as text.")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} is {text!r}; it must be a path or an address, as text.")
    return text


@dataclass(frozen=True, slots=True)
class Record:
    """One verified file, and what was unpacked from it (None: it is no archive, or not unpacked yet)."""

    sha256: str
    size: int
    mtime_ns: int
    unpacked: Unpacked | None = None


def read_records(root: int) -> dict[str, Record]:
    """Read the records by path; a damaged file counts as empty, and every file is then hashed again."""
    try:
        content = json.loads(read_whole(root, RECORDS, RECORDS_BYTES) or "{}")
        return {str(path): _record(row) for path, row in content.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _record(row: dict[str, Any]) -> Record:
    unpacked = row["unpacked"]
    if unpacked is not None:
        unpacked = Unpacked(int(unpacked["files"]), int(unpacked["bytes"]), [str(name) for name in unpacked["names"]])
    return Record(str(row["sha256"]), int(row["size"]), int(row["mtime_ns"]), unpacked)


def write_records(root: int, records: dict[str, Record]) -> None:
    write_whole(root, RECORDS, json.dumps({path: asdict(record) for path, record in records.items()}, indent=1))


def record_of(folder: int, entry: Entry, unpacked: Unpacked | None = None) -> Record:
    status = os.stat(entry.parts[-1], dir_fd=folder)
    return Record(entry.sha256, status.st_size, status.st_mtime_ns, unpacked)


def is_unchanged(root: int, entry: Entry, record: Record | None) -> bool:
    """Check that the file has the size and the time of change it had when it was verified."""
    if record is None or record.sha256 != entry.sha256:
        return False
    try:
        with below(root, entry.parts[:-1]) as folder:
            status = os.stat(entry.parts[-1], dir_fd=folder)
    except (OSError, DataError):
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (entry.size, record.mtime_ns)


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
