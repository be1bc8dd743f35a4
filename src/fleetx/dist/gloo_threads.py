"""Wait for gloo's worker threads before Python exits, when they outlive their process group.

A thread that has finished a collective first wakes the waiting caller and then releases its tensors. Releasing the last reference
to a tensor created in Python needs the interpreter lock; a thread that asks for that lock during interpreter shutdown is killed
inside a destructor, which aborts the process ("terminate called without an active exception") after a successful training.
Closing a group joins its threads, unless another object still refers to the group, as a model in DistributedDataParallel does.
"""

from __future__ import annotations

import time
from pathlib import Path

THREAD_NAME = b"pt_gloo_runloop"
PAUSE_SECONDS = 0.002
LONGEST_SECONDS = 2.0
THREADS_FOLDER = Path("/proc/self/task")
WAITING = b"S"


def wait_until_idle() -> None:
    """Return when every gloo thread is blocked, waiting for work or for another rank; at once when there are none.

    Where /proc cannot be read, sleep for a short fixed time. A collective that was not waited for may still run later."""
    deadline, idle_looks = time.monotonic() + LONGEST_SECONDS, 0
    try:
        # A thread may be blocked on the interpreter lock instead of on work. It gets the lock during the sleep: look twice.
        while (states := _states()) and idle_looks < 2 and time.monotonic() < deadline:
            idle_looks = idle_looks + 1 if set(states) == {WAITING} else 0
            time.sleep(PAUSE_SECONDS)
    except OSError:
        time.sleep(25 * PAUSE_SECONDS)  # a thread needs only microseconds once it has the lock


def _states() -> list[bytes]:
    """Return the state of each gloo thread: R when it runs or could, S when it is blocked."""
    states = []
    for folder in THREADS_FOLDER.iterdir():
        try:
            line = (folder / "stat").read_bytes()  # as bytes: a name cut inside a character is not valid text
        except OSError:  # the thread has ended meanwhile
            continue
        name, _, rest_of_line = line.partition(b"(")[2].rpartition(b")")
        if name == THREAD_NAME:
            states.append(rest_of_line.split()[0])
    return states
