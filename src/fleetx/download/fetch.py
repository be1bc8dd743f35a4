"""Fetch one file into a folder: received as NAME.part, resumed after a break, and renamed once it is verified.

open at the byte we have -> read, hash, write -> right size and SHA-256? -> fsync -> rename
            ^                     | broken: wait, longer each time
            +---------------------+
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ..errors import DataError
from .folder import open_to_read, open_to_write
from .manifest import PART, Entry
from .transport import Address, Broken, open_at

T = TypeVar("T")
Line: TypeAlias = Callable[[str], None]
"""Shows a line to the user."""
Received: TypeAlias = Callable[[int], None]
"""Called with the bytes of a file that are there now."""
CHUNK_BYTES = 2**20
PROGRESS_BYTES = 2**20
"""Bytes of an attempt that reset the count of failures."""
SLOWEST_BYTES_PER_S = 1024
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a failed attempt is retried, how long a silent server is waited for, and the first pause."""

    retries: int
    timeout_seconds: float
    backoff_seconds: float

    def pause_seconds(self, failures: int, at_least: float) -> float:
        """Double the pause with each failure, with jitter: many nodes must not come back at the same moment."""
        doubled = self.backoff_seconds * 2.0 ** min(failures - 1, 30) * random.uniform(0.75, 1.25)
        return min(max(doubled, at_least), LONGEST_PAUSE_S)


def retry(attempt: Callable[[], T], policy: RetryPolicy, what: str, line: Line, received: Callable[[], int]) -> T:
    """Call `attempt` until it works; raise DataError after too many failures in a row without progress."""
    failures, most = 0, received()
    while True:
        try:
            return attempt()
        except Broken as broken:
            # Compared with the most ever received: bytes received again after a restart are no progress.
            failures = 1 if received() - most >= PROGRESS_BYTES else failures + 1
            most = max(most, received())
            if failures > policy.retries:
                tries = "once" if failures == 1 else f"{failures} times"
                more = f" Run it again to go on from byte {received()}." if received() else ""
                raise DataError(f"{what}: {broken}. Tried {tries}.{more}") from None
            pause = policy.pause_seconds(failures, broken.wait_seconds)
            line(f"{what}: {broken}; again in {pause:.1f} s (try {failures + 1} of {policy.retries + 1})")
            time.sleep(pause)


def fetch_small(address: Address, limit_bytes: int, policy: RetryPolicy, line: Line) -> bytes:
    """Read a manifest into memory, up to a limit."""

    def attempt() -> bytes:
        data = bytearray()
        with open_at(address, 0, None, policy.timeout_seconds) as body:
            pace = _Pace(policy.timeout_seconds)
            while chunk := body.read(min(CHUNK_BYTES, limit_bytes + 1 - len(data))):
                data += chunk
                pace.check(len(chunk))
                if len(data) > limit_bytes:
                    raise DataError(f"{address} is larger than {limit_bytes} bytes; that is not a manifest.")
        if body.total is not None and len(data) < body.total:
            raise Broken(f"the connection ended after {len(data)} of {body.total} bytes")
        return bytes(data)

    return retry(attempt, policy, str(address), line, lambda: 0)


def fetch(entry: Entry, folder: int, policy: RetryPolicy, line: Line, received: Received) -> None:
    """Fetch the file of an entry into `folder`. Raises DataError, and then leaves a file of that name as it was."""
    name = entry.parts[-1]
    with _Part.opened(folder, name + PART, entry.size) as part:
        received(part.received)
        for is_second in (False, True):
            what = f"{entry.path} from {entry.address}"
            retry(lambda: _receive(entry, part, policy, received), policy, what, line, lambda: part.received)
            digest = part.hasher.hexdigest()
            if digest == entry.sha256:
                break
            was_resumed = part.was_resumed
            part.restart()
            if is_second or not was_resumed:
                raise DataError(
                    f"{entry.path}: {entry.address} sent other bytes than the manifest promises: "
                    f"SHA-256 {digest}, expected {entry.sha256}. Nothing of it was kept."
                )
            # Pieces of two versions may have been joined: fetch the whole file in one piece before giving up.
            line(f"{entry.path}: the resumed file has another SHA-256; once more from its first byte")
        os.fsync(part.handle)
        os.rename(name + PART, name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def refuse_folder(folder: int, entry: Entry) -> None:
    """Refuse a folder in the place of the file before the download, not after it."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(entry.parts[-1], dir_fd=folder, follow_symlinks=False).st_mode):
            raise DataError(f"{entry.path} is a folder in the target, but a file in the manifest. Remove it first.")


def has_right_bytes(folder: int, entry: Entry, begin: Callable[[], None], received: Received) -> bool:
    """Check by size, then by hash, whether the file is already there."""
    handle = open_to_read(folder, entry.parts[-1])
    if handle is None:
        return False
    with open(handle, "rb", buffering=0) as file:
        if os.fstat(handle).st_size != entry.size:
            return False
        begin()
        hasher, done = hashlib.sha256(), 0
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            done += len(chunk)
            received(done)
    return hasher.hexdigest() == entry.sha256


def _receive(entry: Entry, part: _Part, policy: RetryPolicy, received: Received) -> None:
    """Receive the missing bytes, in one attempt."""
    if part.received == entry.size:
        return
    try:
        with open_at(entry.address, part.received, part.etag, policy.timeout_seconds) as body:
            if body.total is not None and body.total != entry.size:
                raise DataError(
                    f"{entry.path}: {entry.address} has {body.total} bytes, the manifest says {entry.size}: "
                    "one of them is out of date."
                )
            if part.received and body.start and part.etag and body.etag and part.etag != body.etag:
                raise Broken("the file changed on the server", must_restart=True)
            if body.start != part.received:
                part.restart()
            part.etag, part.was_resumed = body.etag, part.received > 0
            pace = _Pace(policy.timeout_seconds)
            while part.received < entry.size:
                chunk = body.read(min(CHUNK_BYTES, entry.size - part.received))
                if not chunk:
                    raise Broken(f"the connection ended after {part.received} of {entry.size} bytes")
                part.append(chunk)
                received(part.received)
                pace.check(len(chunk))
    except Broken as broken:
        if broken.must_restart:
            part.restart()
        raise


class _Pace:
    """Raise Broken below SLOWEST_BYTES_PER_S: a server that sends a byte now and then never times out."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds, self._since, self._count = window_seconds, time.monotonic(), 0

    def check(self, count: int) -> None:
        self._count += count
        seconds = time.monotonic() - self._since
        if seconds >= self._window_seconds:
            if self._count < SLOWEST_BYTES_PER_S * seconds:
                raise Broken(f"only {self._count} bytes came in {seconds:.0f} s")
            self._since, self._count = time.monotonic(), 0


class _Part:
    """The unfinished file NAME.part, with the hash of the bytes in it."""

    def __init__(self, handle: int) -> None:
        self.handle, self.received, self.hasher = handle, 0, hashlib.sha256()
        self.etag: str | None = None
        self.was_resumed = False

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: int, name: str, size: int) -> Iterator[_Part]:
        handle = open_to_write(folder, name)
        part = cls(handle)
        try:
            part._resume(size)
            yield part
        except BaseException:
            if part.received == 0:  # nothing to resume
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(handle)

    def _resume(self, size: int) -> None:
        """Hash what an earlier call left; drop it if it is longer than the file."""
        if os.fstat(self.handle).st_size > size:
            os.ftruncate(self.handle, 0)
        while chunk := os.read(self.handle, CHUNK_BYTES):
            self.hasher.update(chunk)
            self.received += len(chunk)
        self.was_resumed = self.received > 0

    def append(self, chunk: bytes) -> None:
        """Write without a buffer: what a killed process had received is kept."""
        self.hasher.update(chunk)
        view = memoryview(chunk)
        while view:
            count = os.pwrite(self.handle, view, self.received)
            self.received += count
            view = view[count:]

    def restart(self) -> None:
        os.ftruncate(self.handle, 0)
        self.received, self.hasher, self.etag, self.was_resumed = 0, hashlib.sha256(), None, False
