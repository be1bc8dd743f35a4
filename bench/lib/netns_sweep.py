"""What ends a cluster of network namespaces, however its owner ended: a small process that outlives it by a moment.

    python -I -S netns_sweep.py FOLDER NAMESPACE ...

It reads a pipe whose other end only the owner holds. A line on it, or its end (the owner was killed), means that all is to go:
the processes in the namespaces, the namespaces with their links, the folder. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LIMIT_SECONDS = 10.0
SCAN_SECONDS = 0.02
LATE_SECONDS = 0.3


def namespaces_left(names: Collection[str]) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [words[0] for words in map(str.split, listed.splitlines()) if words and words[0] in names]


def processes_in(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]  # of a namespace that is gone: none


def kill_processes(names: Collection[str], limit_seconds: float = LIMIT_SECONDS) -> bool:
    """Kill until none is found: a process may fork while it is being looked for. False: some would not go."""
    limit = time.monotonic() + limit_seconds
    while found := [pid for name in names for pid in processes_in(name)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > limit:
            return False
        time.sleep(SCAN_SECONDS)
    return True


def sweep(folder: str, names: Sequence[str]) -> bool:
    """Whether all is gone. Processes first: a namespace without a name lives on while one is in it, and cannot be found."""
    there = namespaces_left(names)
    are_killed = kill_processes(there)
    for name in there:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    return are_killed and not namespaces_left(names) and not os.path.exists(folder)


def main(folder: str, *names: str) -> int:
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    was_told = bool(sys.stdin.buffer.readline())
    is_clean = sweep(folder, names)
    if not was_told:  # an `ip` that the owner had started may have come to its end only now
        time.sleep(LATE_SECONDS)
        is_clean = sweep(folder, names)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
