"""Let one run at a time write into a folder of checkpoints: two would delete each other's saves.

The first rank of the run holds the file `.writer` in the folder. It says which run writes, on which machine and since when; the
process has a kernel lock on it, which ends with the process, and touches it every few seconds, so that it is seen to live from
machines that do not share the kernel's locks. The file is removed when the run ends.

    locked by another process                        another run writes: refused
    not locked, and of this run or this machine      the process that held it has ended: taken over
    not locked, of another machine                   taken over once it has not been touched for a minute, else refused

A restarted run has the run id of the launcher, and takes over what it held before.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, final

from ..config import log
from ..dist import world
from ..dist.file_lock import NO_LOCKS
from ..dist.machine import boot_name
from ..errors import CheckpointError
from ..launch.guardian import RUN_ID

NAME = ".writer"
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
"""Seconds without a touch after which a run on another machine counts as ended."""
SAME_RUN_SECONDS = 15.0
"""Seconds that a process of this very run, which is being ended, is waited for."""
SIGNED_SECONDS = 5.0
"""Seconds in which a run that has just locked the file writes its name there, on a machine that is busy."""
POLL_SECONDS = 0.2
MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes, as the file says."""

    run: str
    host: str
    machine: str
    """Identifier of this start of the machine's kernel: host names repeat."""
    pid: int
    since: str

    def __str__(self) -> str:
        return f"run {self.run[:12]} (process {self.pid} on {self.host}, since {self.since})"


_this_run = secrets.token_hex(16)
"""Identifier of this process's run where no launcher gives one."""


def this_writer() -> Writer:
    run = os.environ.get(RUN_ID) or _this_run
    return Writer(run, socket.gethostname(), boot_name(), os.getpid(), datetime.now().isoformat(sep=" ", timespec="seconds"))


def _read(handle: int) -> Writer | None:
    """Read who has written the file; None if it is empty or says nothing that can be used."""
    try:
        content: Any = json.loads(os.pread(handle, MOST_BYTES, 0))
        told = {name: str(content[name]).encode("unicode_escape").decode()[:100] for name in Writer.__slots__}
        return Writer(told["run"], told["host"], told["machine"], int(content["pid"]), told["since"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@final
class _Held:
    """A folder that this process writes into."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self.handle, self.pid = path, handle, os.getpid()

    def is_own(self) -> bool:
        """Return whether the file is still the one that was taken: the folder may be deleted, or another run have taken over."""
        try:
            now, mine = os.stat(self.path, follow_symlinks=False), os.fstat(self.handle)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        if self.pid != os.getpid():
            return  # a forked child: the lock is its parent's
        with contextlib.suppress(OSError):
            if self.is_own():
                os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.close(self.handle)


_held: dict[Path, _Held] = {}
_guard = threading.Lock()
_beating: threading.Thread | None = None


def become_writer(directory: Path) -> None:
    """Take the folder for this run, or raise an error that names the run which writes there. It stays taken until this ends."""
    with _guard:
        key = Path(os.path.realpath(directory))
        held = _held.get(key)
        if held is not None and held.is_own():
            return
        if held is not None:
            _held.pop(key).release()
        _held[key] = _Held(key / NAME, _taken(key / NAME))
        _start_beating()


def require_writer(directory: Path) -> None:
    """Raise if another run has taken the folder since, as after a pause in which this one was not seen to live."""
    held = _held.get(Path(os.path.realpath(directory)))
    if held is None or not held.is_own():
        raise CheckpointError(f"{directory} was taken by another run while this one was saving into it. {_ADVICE}")


_ADVICE = "Two runs in one folder would delete each other's checkpoints: give each its own, or end one of them."


def _taken(path: Path) -> int:
    """Open, lock and sign the file; wait while it is not known whether its run has ended."""
    me, began = this_writer(), time.monotonic()
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            is_locked = _lock(handle)
            other = _read(handle)
            is_same_run = other is not None and other.run == me.run
            waits_seconds = SIGNED_SECONDS if other is None else SAME_RUN_SECONDS if is_same_run else 0.0
            if not is_locked and time.monotonic() - began >= waits_seconds:
                raise _refused(path.parent, other)
            if is_locked and _is_linked(path, handle):
                if other is not None and not is_same_run and other.machine != me.machine:
                    _wait_for_silence(path, handle, other)
                _sign(handle, me)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(
            handle
        )  # removed by a run that has just ended, held by a process that is being ended, or not signed yet: once more
        time.sleep(POLL_SECONDS)


def _lock(handle: int) -> bool:
    """Lock the file for this process; return whether that worked, or cannot be known, for want of locks.

    A lock of the process and not of the open file: a forked data loader must not hold it on."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in NO_LOCKS:
            raise
        other = _read(handle)
        return other is None or other.machine != boot_name() or other.pid == os.getpid() or not _is_running(other.pid)
    return True


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_linked(path: Path, handle: int) -> bool:
    return _Held(path, handle).is_own()


def _wait_for_silence(path: Path, handle: int, other: Writer) -> None:
    """Return once a run on another machine has not touched the file for long enough; raise as soon as it does."""
    with tempfile.TemporaryFile(dir=path.parent) as probe:  # asks the clock that has dated the file: machines' clocks differ
        silent_seconds = os.fstat(probe.fileno()).st_mtime - os.fstat(handle).st_mtime
    touched, deadline = os.fstat(handle).st_mtime_ns, time.monotonic() + SILENT_SECONDS - max(0.0, silent_seconds)
    if deadline > time.monotonic():
        log.say(f"fleetx: {path.parent} was last written by {other}; waiting until it is known whether that run has ended.")
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if os.stat(path).st_mtime_ns != touched:
            raise _refused(path.parent, other)


def _refused(directory: Path, other: Writer | None) -> CheckpointError:
    return CheckpointError(f"{directory} is being written by another run: {other or 'one that has not signed yet'}. {_ADVICE}")


def _sign(handle: int, me: Writer) -> None:
    text = json.dumps(asdict(me)).encode()
    os.ftruncate(handle, 0)
    os.pwrite(handle, text, 0)
    os.fsync(handle)


def _start_beating() -> None:
    global _beating
    if _beating is None or not _beating.is_alive():  # none is alive in a forked child
        _beating = threading.Thread(target=_beat, name="fleetx writer", daemon=True)
        _beating.start()


def _beat() -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        for held in list(_held.values()):
            with contextlib.suppress(OSError):
                os.utime(held.handle)


@atexit.register
def release_all() -> None:
    """Let other runs write into all folders that this one has written into."""
    with _guard:
        while _held:
            _held.popitem()[1].release()


world.at_close(release_all)
