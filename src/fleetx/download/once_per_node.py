"""Once per folder: one process works while the others wait, then they take over its result.

.fleetx-lock        locked by whoever works. The kernel frees it when its holder dies. (flock reaches across nodes on NFS 4 too.)
.fleetx-note.json   who works at what, how many turns have ended, and how the last one ended

A rank that waited while the same request failed raises the same error at once: with a dead server, eight ranks that
each tried in turn would keep the node busy for eight times the patience of one.
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
"""When a waiting process first says so, and how often after that."""
NOTE_EVERY_S = 5.0
_LEFT = re.compile(rf"{re.escape(RESERVED)}(unpacking-)?[0-9a-f]{{32}}")
_FIELDS = (("turns", int), ("has_ended", bool), ("request", str), ("pid", int), ("host", str), ("doing", str))
_KINDS: dict[str, type[FleetError]] = {"DataError": DataError, "ConfigError": ConfigError}


@dataclass(frozen=True, slots=True)
class Note:
    turns: int = 0
    """How many have ended. A number, not a time: the clocks of two nodes differ."""
    has_ended: bool = False
    """False while its writer works, and for ever if it was killed."""
    request: str = ""
    pid: int = 0
    host: str = ""
    doing: str = ""
    error: list[str] = field(default_factory=list)
    """Kind and message, if the turn failed."""


def read_note(folder: int) -> Note:
    """A missing or damaged one is as if no turn had been."""
    try:
        found = Note(**json.loads(read_whole(folder, NOTE, NOTE_BYTES) or "{}"))
        valid = all(isinstance(getattr(found, name), kind) for name, kind in _FIELDS)
        valid = valid and isinstance(found.error, list) and all(isinstance(text, str) for text in found.error)
        return found if valid else Note()
    except (ValueError, TypeError, RecursionError):
        return Note()


class Turn:
    """Held by the process that works; it tells the others how far it is."""

    def __init__(self, folder: int, before: Note, request: str) -> None:
        self._folder, self._turns, self._request, self._told = folder, before.turns, request, float("-inf")

    def tell(self, doing: str) -> None:
        if time.monotonic() - self._told >= NOTE_EVERY_S:
            self._write(Note(self._turns, False, self._request, os.getpid(), socket.gethostname(), doing))
            self._told = time.monotonic()

    def end(self, error: FleetError | None) -> None:
        kind = [] if error is None else [type(error).__name__, str(error)[: NOTE_BYTES // 8]]
        self._write(Note(self._turns + 1, True, self._request, os.getpid(), socket.gethostname(), "", kind))

    def _write(self, note: Note) -> None:
        write_whole(self._folder, NOTE, json.dumps(asdict(note)))


def once(folder: int, request: str, work: Callable[[Turn], None], line: Callable[[str], None]) -> None:
    """Do the work, or wait until another process has done the very same."""
    before = read_note(folder)
    with _locked(folder, line):
        now = read_note(folder)
        if now.turns > before.turns and now.has_ended and now.request == request:
            if now.error:
                raise _KINDS.get(now.error[0], DataError)(now.error[-1])
            return
        _clear_leftovers(folder)
        turn = Turn(folder, now, request)
        turn.tell("starting")
        try:
            work(turn)
        except FleetError as error:
            with contextlib.suppress(OSError):  # a full disk: the error itself matters more than telling it
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
    """What killed processes left half-written. Only the holder of the lock makes such names, so none is in use."""
    for name in os.listdir(folder):
        if not _LEFT.fullmatch(name):
            continue
        if name.startswith(UNPACKING):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
