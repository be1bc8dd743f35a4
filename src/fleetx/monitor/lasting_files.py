"""Files of a folder that come back: what a full disk does not take waits in memory, and a folder that was deleted is made again.

Lines go to one file, in order; of each other file the newest content counts. The first failure is told in a warning, and that it
is over in a line. Training goes on in any case.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from pathlib import Path
from typing import IO, final

from ..config import log
from ..dist.own_files import open_to_append, replace_file
from ..errors import warn_user

MOST_LINES = 20_000
"""Lines that wait at most; older ones are dropped. About 20 MB."""
RETRY_SECONDS = 5.0
LOOK_SECONDS = 1.0


@final
class LastingFiles:
    """The files that worker 0 writes."""

    def __init__(self, folder: Path, lines_name: str) -> None:
        """Open the file of lines, which must work now."""
        self._folder, self._path = folder, folder / lines_name
        self._lines: collections.deque[bytes] = collections.deque()
        self._lost_lines = 0
        self._contents: dict[str, bytes] = {}
        """Newest content of every file, to write it again in a new folder."""
        self._waiting: set[str] = set()
        self._is_broken = False
        self._next_try_seconds = 0.0
        self._next_look_seconds = time.monotonic() + LOOK_SECONDS
        self._file = _opened(self._path)

    def add_line(self, line: bytes) -> None:
        """Append a line, which ends with a line end, now or later."""
        self._lines.append(line)
        if len(self._lines) > MOST_LINES:
            self._lines.popleft()
            self._lost_lines += 1
        self._flush()

    def put(self, name: str, content: bytes) -> None:
        """Replace a file by this content, now or later."""
        self._contents[name] = content
        self._waiting.add(name)
        self._flush()

    def keep_only(self, names: set[str], pattern: str) -> None:
        """Delete files that match the pattern, but for these."""
        with contextlib.suppress(OSError):
            for old in self._folder.glob(pattern):
                if old.name not in names:
                    self._contents.pop(old.name, None)
                    old.unlink()

    def move_lines(self, name: str) -> None:
        """Rename the file of lines, and begin a new one."""
        self._file.close()
        with contextlib.suppress(OSError):
            os.replace(self._path, self._folder / name)
        self._next_look_seconds = 0.0  # finds that the file is gone
        self._flush()

    def close(self) -> None:
        self._next_try_seconds = 0.0
        self._flush()
        with contextlib.suppress(OSError):
            self._file.close()

    def _flush(self) -> None:
        now = time.monotonic()
        if self._is_broken and now < self._next_try_seconds:
            return
        try:
            self._write_all(now)
        except OSError as error:
            self._next_try_seconds = now + RETRY_SECONDS
            if not self._is_broken:
                self._is_broken = True
                warn_user(
                    f"the run folder {self._folder} cannot be written now ({error}); training goes on, and what is recorded "
                    "waits in memory."
                )
            return
        if self._is_broken:
            self._is_broken = False
            lost, self._lost_lines = self._lost_lines, 0
            log.say(f"fleetx: the run folder {self._folder} is written again" + (f"; {lost:,} lines were lost." if lost else "."))

    def _write_all(self, now: float) -> None:
        if now >= self._next_look_seconds or self._is_broken:
            self._next_look_seconds = now + LOOK_SECONDS
            self._reopen_if_gone()
        while self._lines:
            _write_whole(self._file, self._lines[0])
            self._lines.popleft()
        for name in sorted(self._waiting):
            replace_file(self._folder / name, self._contents[name])
            self._waiting.remove(name)

    def _reopen_if_gone(self) -> None:
        """Make the file of lines again where it was deleted or moved, with its folder and the other files."""
        if _is_at(self._file, self._path):
            return
        had_folder = self._folder.is_dir()
        self._folder.mkdir(parents=True, exist_ok=True)
        opened = _opened(self._path)
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = opened
        if not had_folder:
            self._waiting |= set(self._contents)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
        mine = os.fstat(file.fileno())
    except (OSError, ValueError):  # the second: it is closed
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _write_whole(file: IO[bytes], line: bytes) -> None:
    """Write a line or nothing: a full disk may take a part of it."""
    before = os.fstat(file.fileno()).st_size
    try:
        view = memoryview(line)
        while view:
            view = view[file.write(view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), before)
        raise


def _opened(path: Path) -> IO[bytes]:
    """Open for unbuffered appending. Terminate a last line that a kill truncated, so that new records start on a new one."""
    file = open_to_append(path)
    file.seek(max(0, file.tell() - 1))
    if file.read() not in (b"", b"\n"):
        file.write(b"\n")
    return file
