"""What ends a run whose launcher was killed: a small process that outlives it by a moment.

The kernel kills each worker with its launcher (worker.py asks for that), but not what the workers started: data loaders,
subprocesses. The guardian reads a pipe whose other end only the launcher holds. Lines on it name the workers; its end
without the word `end` means that the launcher is gone, so everything of the run is killed and its folder removed.

Started as `python -I -S guardian.py RUN_ID FOLDER`: standard library only, and nothing of the user's site.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection

RUN_ID = "FLEETX_RUN_ID"
"""In the environment of every process of a run, and of no other: a process number may be reused, this is not."""
GOODBYE = b"end\n"
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SCAN_SECONDS = 0.05
EMPTY_SCANS = 3


def has_run_id(pid: int, run_id: str) -> bool:
    """Whether this process was started by the run; False also for one that is gone, dead or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"\0{RUN_ID}={run_id}\0".encode() in b"\0" + file.read()
    except OSError:
        return False


def find_run(run_id: str, workers: Collection[int]) -> list[int]:
    """All processes of the run, also those that cleared their environment but share a worker's session with one that did not."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    marked = {pid for pid in pids if has_run_id(pid, run_id)}
    sessions = {_session(pid) for pid in marked} & set(workers)
    return [pid for pid in pids if pid in marked or _session(pid) in sessions]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def kill_run(run_id: str, workers: Collection[int], *, limit_seconds: float) -> bool:
    """Kill until nothing is found several times in a row: a process may fork while it is being looked for."""
    limit = time.monotonic() + limit_seconds
    empty = 0
    while empty < EMPTY_SCANS:
        found = [pid for pid in find_run(run_id, workers) if not _is_dead(pid)]
        empty = 0 if found else empty + 1
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if empty < EMPTY_SCANS:
            if time.monotonic() > limit:
                return False
            time.sleep(SCAN_SECONDS if found else SCAN_SECONDS / EMPTY_SCANS)
    return True


def _is_dead(pid: int) -> bool:
    """A zombie needs no further signal; its parent may take its time to notice."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def main(run_id: str, folder: str) -> int:
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    workers = set()
    for line in sys.stdin.buffer:
        if line == GOODBYE:
            return 0
        workers.add(int(line))
    kill_run(run_id, workers, limit_seconds=10.0)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
