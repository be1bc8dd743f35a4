"""The ranks' log files: begin them, mark attempts in them, copy them to the console, read the last lines of a failure."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

from ..dist.own_files import check_own_folder, create_own, open_own, open_to_append
from ..errors import ConfigError
from .console import Bare, View, escape
from .topology import log_path, older_log, stale_logs

FOLLOW_SECONDS = 0.1
CHUNK_BYTES = 1 << 16
TAIL_BYTES = 1 << 14
ERASE_LINE, SHOW_CURSOR = b"\r\x1b[K", b"\x1b[?25h"
STACK_HEADING = "(most recent call first):"
"""Heading of each thread's stack as faulthandler writes it; the main thread's is the last."""


def check_folder(log_dir: Path) -> None:
    """Create the folder and test that it can be written: one error now is better than one from every rank."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        check_own_folder(log_dir)
    except OSError as error:
        raise _unusable(log_dir, error) from error


def start_fresh(log_dir: Path, ranks: range, *, world_size: int) -> Path | None:
    """Begin the logs of these ranks; move those of an earlier run to a folder with a number, which is returned.

    Logs of an earlier, larger run are moved by node 0: other nodes' logs may be in use already."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        used = [path for rank in ranks for log in [log_path(log_dir, rank)] for path in (log, older_log(log))]
        if 0 in ranks:
            used += stale_logs(log_dir.glob("workerlog.*"), world_size=world_size)
        kept = keep_logs(log_dir, [path for path in dict.fromkeys(used) if _holds_lines(path)])
        for rank in ranks:
            create_own(log_path(log_dir, rank))
        for path in set(used) - {log_path(log_dir, rank) for rank in ranks}:
            path.unlink(missing_ok=True)  # empty, or a link
    except OSError as error:
        raise _unusable(log_dir, error) from error
    return kept


def keep_logs(log_dir: Path, logs: Sequence[Path]) -> Path | None:
    """Move logs to `run-1` of their folder, or the next number that has none of these ranks; nodes that share a folder take the
    same one. A folder that another user has made there is left alone: logs hold what scripts print."""
    if not logs:
        return None
    for number in itertools.count(1):
        folder = log_dir / f"run-{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        is_own = folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.geteuid()
        if is_own and not any((folder / log.name).exists() for log in logs):
            for log in logs:
                log.rename(folder / log.name)
            return folder
    return None


def _holds_lines(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size > 0


def _unusable(log_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--log_dir {log_dir} cannot be written: {error}. Name a folder of your own.")


def mark_attempt(log: Path, attempt: int, max_restart: int, *, overwrite: bool) -> None:
    """Write a line into a rank's log where an attempt begins; or empty the log. A full disk, or a folder that was deleted, costs
    this line and no restart."""
    count = f"{attempt + 1} of {max_restart + 1}" if attempt <= max_restart else f"{attempt + 1}"
    marker = f"--- attempt {count}, {datetime.now():%Y-%m-%d %H:%M:%S} ---\n"
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open_to_append(log) as file:
            if overwrite:
                file.truncate(0)
            else:
                file.seek(max(0, file.tell() - 1))
                is_amid_line = file.read() not in (b"", b"\n")  # a killed rank may leave an incomplete line
                file.write(b"\n" * is_amid_line + marker.encode())


class ConsoleGone(Exception):
    """The console is closed: `fleetrun ... | head`, or a closed terminal."""


def write_all(data: bytes, descriptor: int = 1) -> None:
    """Write to the descriptor itself: a thread blocked in sys.stdout would hold its lock and crash the interpreter at exit."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError as error:
            raise ConsoleGone from error


class _Tail:
    """One log and the position read so far. It may be emptied, replaced, or deleted and made again."""

    def __init__(self, path: Path, view: View) -> None:
        self.view = view
        self._path = path
        self._file = self._opened()

    def _opened(self) -> IO[bytes] | None:
        try:
            return open(open_own(self._path, os.O_RDONLY), "rb", buffering=0)
        except OSError:
            return None

    def read(self) -> tuple[bytes, bool]:
        """Return the next piece, and whether the file was emptied or replaced before it."""
        if self._file is None:
            self._file = self._opened()
            return (self._file.read(CHUNK_BYTES) or b"" if self._file is not None else b""), False
        if data := self._file.read(CHUNK_BYTES):
            return data, False
        try:
            now = self._path.stat(follow_symlinks=False)
        except OSError:  # deleted: the open file still grows
            return b"", False
        if now.st_ino != os.fstat(self._file.fileno()).st_ino:
            return self._next_file()
        if now.st_size >= self._file.tell():
            return b"", False
        self._file.seek(0)
        return self._file.read(CHUNK_BYTES) or b"", True

    def _next_file(self) -> tuple[bytes, bool]:
        assert self._file is not None
        if data := self._file.read(CHUNK_BYTES):  # written just before the file was replaced
            return data, False
        opened = self._opened()
        if opened is None:
            return b"", False
        self._file.close()
        self._file = opened
        return opened.read(CHUNK_BYTES) or b"", True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Screen:
    """Writes whole lines: a prefixed line starts at the left edge, even if the bare rank's line is incomplete.

    `is_shared`: rank 0 redraws a line of its own on the terminal; it is erased first, and rank 0 draws it again."""

    def __init__(self, write: Callable[[bytes], None], *, is_shared: bool = False) -> None:
        self._write, self._is_shared = write, is_shared
        self._is_at_edge = True

    def show(self, data: bytes, view: View) -> None:
        if not data:
            return
        needs_edge = not self._is_at_edge and not isinstance(view, Bare)
        erase = ERASE_LINE if self._is_shared and self._is_at_edge else b""
        self._write(erase + (b"\n" + data if needs_edge else data))
        self._is_at_edge = data.endswith(b"\n")


def follow(tails: Sequence[_Tail], finished: threading.Event, write: Callable[[bytes], None], *, is_shared: bool) -> None:
    """Copy growing files to the console until `finished` is set and their ends are reached."""
    screen = _Screen(write, is_shared=is_shared)
    with contextlib.suppress(ConsoleGone):  # ends the copy, not the run
        while True:
            is_last_pass = finished.is_set()  # checked before reading, so that everything written until then is read
            has_more = False
            for tail in tails:
                data, is_new = tail.read()
                if is_new:
                    screen.show(tail.view.end(), tail.view)
                screen.show(tail.view.feed(data), tail.view)
                if not data:
                    screen.show(tail.view.wait(), tail.view)
                has_more |= bool(data)
            if is_last_pass and not has_more:
                break
            if not has_more:
                finished.wait(FOLLOW_SECONDS)
        for tail in tails:
            screen.show(tail.view.end(), tail.view)
        if is_shared:  # a killed rank cannot show it again itself
            write(SHOW_CURSOR)


class Follower:
    """Follows all logs of this node in one thread."""

    def __init__(self, write: Callable[[bytes], None] = write_all, *, is_shared: bool = False) -> None:
        self._write, self._is_shared = write, is_shared
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        self._tails: list[_Tail] = []

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self, views: Sequence[tuple[Path, View]]) -> None:
        self._tails = [_Tail(path, view) for path, view in views]
        arguments, more = (self._tails, self._finished, self._write), {"is_shared": self._is_shared}
        self._thread = threading.Thread(target=follow, args=arguments, kwargs=more, daemon=True)
        self._thread.start()

    def stop(self, limit_seconds: float | None = None) -> None:
        """Return when everything is copied, or after the limit: a console such as a pager may accept nothing."""
        self._finished.set()
        if self._thread is None:
            return
        self._thread.join(limit_seconds)
        if not self._thread.is_alive():
            for tail in self._tails:
                tail.close()


def last_lines(path: Path, count: int) -> list[str]:
    return _tail(path)[-count:] if count > 0 else []


def innermost_calls(path: Path, count: int) -> list[str]:
    """Return the top of the main thread's stack if the log ends with one."""
    lines = _tail(path)
    headings = [index for index, line in enumerate(lines) if line.endswith(STACK_HEADING)]
    calls = lines[headings[-1] + 1 :] if headings else []
    return calls[:count] if all(line.startswith("  ") for line in calls) else []


def _tail(path: Path) -> list[str]:
    """Return the lines at the end of a log, without blank ones."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:  # removed by hand: the failure is reported without it
        return []
    return [escape(line) for line in text.splitlines() if line.strip()]
