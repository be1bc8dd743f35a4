"""The guardian: a small process that ends a run whose launcher was killed.

The kernel kills each worker with its launcher (worker.py requests it), but not the processes that workers started, such as data
loaders. The guardian reads a pipe from the launcher. Lines on it are process ids of workers; if it closes without a last line
`end`, the launcher was killed, and the guardian kills all processes of the run and removes its folder.

Started as `python -I -S guardian.py RUN_ID FOLDER`: standard library only, without the user's site-packages.
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
"""Variable in the environment of every process of a run, by which they are found: unlike a process id it is never reused."""
GOODBYE = b"end\n"
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
SCAN_SECONDS = 0.05
EMPTY_SCANS = 3


def has_run_id(pid: int, run_id: str) -> bool:
    """Return whether the process was started by the run; False if it has ended or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"\0{RUN_ID}={run_id}\0".encode() in b"\0" + file.read()
    except OSError:
        return False


def find_run(run_id: str, workers: Collection[int]) -> list[int]:
    """Find all processes of the run, including those with a cleared environment in the session of a worker."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    marked = {pid for pid in pids if has_run_id(pid, run_id)}
    sessions = {_session(pid) for pid in marked} & set(workers)
    return [pid for pid in pids if pid in marked or _session(pid) in sessions]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def kill_run(run_id: str, workers: Collection[int], *, limit_seconds: float, spared: Collection[int] = ()) -> bool:
    """Kill until no process is found several times in a row: one may fork during a scan. Return False at the time limit.

    `spared`: processes of the run that go on."""
    limit = time.monotonic() + limit_seconds
    empty = 0
    while empty < EMPTY_SCANS:
        found = [pid for pid in find_run(run_id, workers) if pid not in spared and not _is_dead(pid)]
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
    """Return whether the process has ended. A zombie counts as ended: only its parent has yet to collect it."""
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
