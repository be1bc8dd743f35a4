"""Threads of gloo that outlive their group, at rest before Python ends.

A thread that has carried out a collective first tells whoever waits for it, and then lets go of its tensors. The last hold on a
tensor that was made in Python is let go of under Python's lock; and a thread that asks for that lock while Python is ending is
ended there and then, inside a destructor, which ends the process: "terminate called without an active exception", after a
training that went well. A group that is closed joins its threads. One that somebody still holds does not, and a model in torch's
DistributedDataParallel holds one.
"""

from __future__ import annotations

import time
from pathlib import Path

THREAD_NAME = b"pt_gloo_runloop"
PAUSE_SECONDS = 0.002
LONGEST_SECONDS = 2.0
OF_THREADS = Path("/proc/self/task")
WAITING = b"S"


def rest() -> None:
    """Returns when all of them wait, for work or for another rank: one of a collective that nobody waited for may be at work
    later. At once where there are none; after a short while where nobody can tell."""
    deadline, calm = time.monotonic() + LONGEST_SECONDS, 0
    try:
        # A thread may wait for Python's lock, and not for work, while this one looks. It has it in the pause, so two looks tell.
        while (states := _states()) and calm < 2 and time.monotonic() < deadline:
            calm = calm + 1 if set(states) == {WAITING} else 0
            time.sleep(PAUSE_SECONDS)
    except OSError:
        time.sleep(25 * PAUSE_SECONDS)  # microseconds are all that a thread needs, once it is let


def _states() -> list[bytes]:
    """Of each such thread: R where it runs or would, S where it waits."""
    found = []
    for folder in OF_THREADS.iterdir():
        try:
            line = (folder / "stat").read_bytes()  # a name that was cut in the middle of a letter is no text
        except OSError:  # it has ended since
            continue
        name, _, rest_of_line = line.partition(b"(")[2].rpartition(b")")
        if name == THREAD_NAME:
            found.append(rest_of_line.split()[0])
    return found
