"""Where this rank is: one small record in shared memory that a launcher reads without asking, and without stopping anybody.

worker     progress.at_step(812)                      the update under way, counted from 1
           with progress.during(Phase.WAIT): ...      the one place that waits is comm.Pending.wait
launcher   progress.read(path)                        None until the worker first says something
monitor    progress.listen(heard)                     told of every change of phase, in the thread that trains

Standard library only: the launcher reads it before torch is imported, and a record costs the worker less than a microsecond.
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
"""The variable that names this rank's record. The launcher makes the file before the worker starts."""

_RECORD = struct.Struct("<qqq")  # step, phase, since_ns of CLOCK_MONOTONIC, which all processes of a machine share
RECORD_BYTES = _RECORD.size


class Phase(enum.IntEnum):
    SCRIPT = 1
    """In the user's own code."""
    BACKWARD = 2
    WAIT = 3
    """In a collective, until the other ranks are there too."""
    SAVE = 4
    FORWARD = 5
    """Of a model in training, and the loss after it; known only while a monitor looks."""
    UPDATE = 6
    EVALUATE = 7
    """A forward that no backward will follow; known only while a monitor looks."""


_PHASES = frozenset(int(phase) for phase in Phase)


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    """The update under way, from 1; 0 before the first."""
    phase: Phase
    since_ns: int
    """When the record last changed, on CLOCK_MONOTONIC."""

    def silent_seconds(self, now_ns: int) -> float:
        return (now_ns - self.since_ns) / 1e9


def make_file(path: Path) -> None:
    path.write_bytes(bytes(RECORD_BYTES))


def read(path: Path) -> Progress | None:
    """A rank that never calls the library has nothing to say."""
    data = path.read_bytes()
    if len(data) < RECORD_BYTES:
        return None
    step, phase, since_ns = _RECORD.unpack_from(data)
    return Progress(step, Phase(phase), since_ns) if since_ns and phase in _PHASES else None


class _Record:
    """The worker's side. Without a launcher it writes to nowhere."""

    def __init__(self) -> None:
        self.step, self.phase = 0, Phase.SCRIPT
        self.reduce: object = None
        self.thread = threading.main_thread().ident
        self.listener: Callable[[Phase], None] | None = None
        self._page: mmap.mmap | bytearray = bytearray(RECORD_BYTES)
        path = os.environ.get(PROGRESS_FILE)
        if path:
            # A launcher's file that has vanished must not end a training run: the record is a courtesy.
            with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
                self._page = mmap.mmap(file.fileno(), RECORD_BYTES)

    def write(self, phase: Phase) -> None:
        if threading.get_ident() != self.thread:
            return  # a checkpoint written in the background is not where the rank is
        self.phase = phase
        if self.listener is not None:
            self.listener(phase)
        _RECORD.pack_into(self._page, 0, self.step, self.phase, time.monotonic_ns())


_record = _Record()


def at_step(step: int, phase: Phase = Phase.SCRIPT) -> None:
    _record.step, _record.reduce = step, None
    _record.write(phase)


def at_reduce(place: object) -> None:
    """Until the next step: what is reduced, as `str(place)` would say it."""
    _record.reduce = place


def where() -> str:
    """This rank's place, for an error."""
    if _record.reduce is not None:
        return str(_record.reduce)
    return f"a call before update {_record.step}" if _record.step else "a call before the first update"


def write_from_here() -> int | None:
    """Let this thread write, while the one that trains waits for it: autograd's, on a GPU. The thread that wrote until now."""
    before, _record.thread = _record.thread, threading.get_ident()
    return before


def write_from(thread: int | None) -> None:
    """Let this thread write again."""
    _record.thread = thread


def now() -> Phase:
    return _record.phase


def enter(phase: Phase) -> None:
    """Until the next change, whoever makes it."""
    _record.write(phase)


def listen(listener: Callable[[Phase], None] | None) -> None:
    """Tell it of every change of phase from now on. The thread that asks is the one that trains: under some frameworks it is
    not the main one."""
    _record.listener = listener
    if listener is not None:
        _record.thread = threading.get_ident()


@contextlib.contextmanager
def during(phase: Phase) -> Iterator[None]:
    before = _record.phase
    _record.write(phase)
    try:
        yield
    finally:
        _record.write(before)
