"""Do work once per folder: one process does it while the others wait, and these take over its result.

.fleetx-lock        locked by the process that works; the kernel frees it when that dies (on NFS 4 across nodes too)
.fleetx-note.json   which process works at what, how many turns have ended, and how the last one ended

A rank that waited while the same request failed raises the same error at once: with a dead server, eight ranks that
retry one after the other would take eight times as long to fail as one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from ..dist.file_lock import LocksMissingError, lock_aloud
from ..errors import ConfigError, DataError, FleetError
from .folder import RESERVED, open_to_write, read_whole, write_whole

LOCK, NOTE = f"{RESERVED}lock", f"{RESERVED}note.json"
UNPACKING = f"{RESERVED}unpacking-"
NOTE_BYTES = 64 * 2**10
FIRST_WORD_S, NEXT_WORD_S = 5.0, 30.0
"""Seconds until a waiting process first says so, and between its later lines."""
NOTE_EVERY_S = 5.0
_LEFT = re.compile(rf"{re.escape(RESERVED)}(unpacking-)?[0-9a-f]{{32}}")
_FIELDS = (("turns", int), ("has_ended", bool), ("request", str), ("pid", int), ("host", str), ("doing", str))
_KINDS: dict[str, type[FleetError]] = {"DataError": DataError, "ConfigError": ConfigError}


@dataclass(frozen=True, slots=True)
class Note:
    """Content of .fleetx-note.json: the turn that is running, or the last one that ended."""

    turns: int = 0
    """Turns that have ended. Not a time: the clocks of two nodes differ."""
    has_ended: bool = False
    """Whether the turn ended: it stays False if its process was killed."""
    request: str = ""
    pid: int = 0
    host: str = ""
    doing: str = ""
    error: list[str] = field(default_factory=list)
    """Class name and message of the error, empty if there was none."""


def read_note(folder: int) -> Note:
    """Read the note; a missing or damaged one counts as no turn yet."""
    try:
        note = Note(**json.loads(read_whole(folder, NOTE, NOTE_BYTES) or "{}"))
        valid = all(isinstance(getattr(note, name), kind) for name, kind in _FIELDS)
        valid = valid and isinstance(note.error, list) and all(isinstance(text, str) for text in note.error)
        return note if valid else Note()
    except (ValueError, TypeError, RecursionError):
        return Note()


class Turn:
    """The turn of the process that works; notes its progress for the waiting processes."""

    def __init__(self, folder: int, before: Note, request: str) -> None:
        self._folder, self._turns, self._request, self._noted_at = folder, before.turns, request, float("-inf")

    def note(self, doing: str) -> None:
        """Write what is being done, at most every NOTE_EVERY_S."""
        if time.monotonic() - self._noted_at >= NOTE_EVERY_S:
            self._write(Note(self._turns, False, self._request, os.getpid(), socket.gethostname(), doing))
            self._noted_at = time.monotonic()

    def end(self, error: FleetError | None) -> None:
        kind = [] if error is None else [type(error).__name__, str(error)[: NOTE_BYTES // 8]]
        self._write(Note(self._turns + 1, True, self._request, os.getpid(), socket.gethostname(), "", kind))

    def _write(self, note: Note) -> None:
        write_whole(self._folder, NOTE, json.dumps(asdict(note)))


def once(folder: int, request: str, work: Callable[[Turn], None], line: Callable[[str], None]) -> None:
    """Do the work, or wait until another process has done the same request."""
    before = read_note(folder)
    with _locked(folder, line):
        now = read_note(folder)
        if now.turns > before.turns and now.has_ended and now.request == request:
            if now.error:
                raise _KINDS.get(now.error[0], DataError)(now.error[-1])
            return
        _clear_leftovers(folder)
        turn = Turn(folder, now, request)
        turn.note("starting")
        try:
            work(turn)
        except FleetError as error:
            with contextlib.suppress(OSError):  # perhaps a full disk: raise the first error
                turn.end(error)
            raise
        turn.end(None)


@contextlib.contextmanager
def _locked(folder: int, line: Callable[[str], None]) -> Iterator[None]:
    handle = open_to_write(folder, LOCK)  # never deleted: two processes could then lock two files of the same name
    try:
        _wait(handle, folder, line)
        yield
    finally:
        os.close(handle)


def _wait(handle: int, folder: int, line: Callable[[str], None]) -> None:
    def say(waited_s: float) -> None:
        note = read_note(folder)
        doing = f" ({note.doing})" if note.doing else ""
        line(f"waiting for pid {note.pid} on {note.host} to download{doing}: {waited_s:.0f} s so far")

    try:
        lock_aloud(handle, say, first_word_s=FIRST_WORD_S, next_word_s=NEXT_WORD_S)
    except LocksMissingError as error:
        raise DataError(
            f"the target's file system has no file locks ({error.strerror}), so that one process could download while "
            "others wait. Choose a folder on a local disk, or mount it with locks (Lustre: -o flock)."
        ) from None


def _clear_leftovers(folder: int) -> None:
    """Remove what killed processes left half-written. Only the holder of the lock creates such names: none is in use."""
    for name in os.listdir(folder):
        if not _LEFT.fullmatch(name):
            continue
        if name.startswith(UNPACKING):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
