"""Progress of this rank: a small record in shared memory that the launcher reads without a message and without pausing the rank.

worker     heartbeat.at_step(812)                      the current update, counted from 1
           with heartbeat.during(Phase.WAIT): ...      entered in one place: comm.Pending.wait
launcher   heartbeat.read(path)                        None until the worker has written its first record
monitor    heartbeat.listen(on_phase)                  called at every change of phase, in the training thread

Standard library only: the launcher uses it without importing torch. Writing a record takes less than a microsecond.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRESS_FILE = "FLEETX_PROGRESS_FILE"
"""Environment variable with the path of this rank's record. The launcher creates the file before it starts the worker."""

_RECORD = struct.Struct("<qqq")  # step, phase, since_ns on CLOCK_MONOTONIC, which all processes of a machine share
RECORD_BYTES = _RECORD.size


class Phase(enum.IntEnum):
    SCRIPT = 1
    """In the user's own code."""
    BACKWARD = 2
    WAIT = 3
    """In a collective, waiting for other ranks."""
    SAVE = 4
    FORWARD = 5
    """In the forward of a training model or in its loss; recorded only while a monitor listens."""
    UPDATE = 6
    EVALUATE = 7
    """In a forward without a later backward; recorded only while a monitor listens."""


_PHASES = frozenset(int(phase) for phase in Phase)


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    """Current update, counted from 1; 0 before the first."""
    phase: Phase
    since_ns: int
    """Time of the last change of the record, in nanoseconds of CLOCK_MONOTONIC."""

    def silent_seconds(self, now_ns: int) -> float:
        return (now_ns - self.since_ns) / 1e9


def make_file(path: Path) -> None:
    path.write_bytes(bytes(RECORD_BYTES))


def read(path: Path) -> Progress | None:
    """Return the record, or None when the rank has not called the library yet."""
    data = path.read_bytes()
    if len(data) < RECORD_BYTES:
        return None
    step, phase, since_ns = _RECORD.unpack_from(data)
    return Progress(step, Phase(phase), since_ns) if since_ns and phase in _PHASES else None


class _Record:
    """The worker's record. Without a launcher it is a plain buffer that no process reads."""

    def __init__(self) -> None:
        self.step, self.phase = 0, Phase.SCRIPT
        self.reduce: object = None
        """The place of the current reduction, for `where`, until the next step. It is formatted with `str` only if needed."""
        self.thread = threading.main_thread().ident
        self.listener: Callable[[Phase], None] | None = None
        self._page: mmap.mmap | bytearray
        self.is_read: bool
        """A launcher or a listener reads the phases."""
        self.open_file()

    def open_file(self) -> None:
        """Write to the file that the environment names. Called again by a rank that was forked with this module imported."""
        self._page = bytearray(RECORD_BYTES)
        path = os.environ.get(PROGRESS_FILE)
        if path:
            # Training goes on when the launcher's file has vanished: the record is only for diagnosis.
            with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
                self._page = mmap.mmap(file.fileno(), RECORD_BYTES)
        self.is_read = self._is_shared = isinstance(self._page, mmap.mmap)

    def listen(self, listener: Callable[[Phase], None] | None) -> None:
        self.listener, self.is_read = listener, listener is not None or self._is_shared
        if listener is not None:
            self.thread = threading.get_ident()

    def write(self, phase: Phase) -> None:
        if threading.get_ident() != self.thread:
            return  # a checkpoint written in the background is not the rank's phase
        self.phase = phase
        if self.listener is not None:
            self.listener(phase)
        _RECORD.pack_into(self._page, 0, self.step, self.phase, time.monotonic_ns())


record = _Record()


def at_step(step: int, phase: Phase = Phase.SCRIPT) -> None:
    """Record the current update and phase."""
    record.step, record.reduce = step, None
    record.write(phase)


def where() -> str:
    """Describe where this rank is, for an error message."""
    if record.reduce is not None:
        return str(record.reduce)
    return f"a call before update {record.step}" if record.step else "a call before the first update"


def write_from_here() -> int | None:
    """Let the calling thread write records (on a GPU autograd's, while the training thread waits); return the former writer."""
    before, record.thread = record.thread, threading.get_ident()
    return before


def write_from(thread: int | None) -> None:
    """Let the given thread write records, and no other."""
    record.thread = thread


def now() -> Phase:
    return record.phase


def enter(phase: Phase) -> None:
    """Record a phase that lasts until the next record."""
    record.write(phase)


def listen(listener: Callable[[Phase], None] | None) -> None:
    """Call `listener` at every change of phase; None removes it. The calling thread becomes the training thread, which under
    some frameworks is not the main thread."""
    record.listen(listener)


@contextlib.contextmanager
def during(phase: Phase) -> Iterator[None]:
    """Record a phase for the length of the block, then the former phase again."""
    before = record.phase
    record.write(phase)
    try:
        yield
    finally:
        record.write(before)
