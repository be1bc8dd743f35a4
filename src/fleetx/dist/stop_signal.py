"""Graceful stop: SIGTERM, SIGUSR1 or Ctrl-C is recorded here, and all ranks stop together at the end of an update.

Handlers are installed at the first call of `fleet.should_stop()`: these signals end a script that never calls it, as usual.
A second signal ends the process at once, except under fleetrun, which decides itself: a cluster manager may signal both the
workers and the launcher, which forwards the signal. Ctrl-C reaches fleetrun alone, which asks the workers by SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

from ..errors import warn_user

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LAUNCHER_PID = "FLEETX_LAUNCHER_PID"

requested = False
"""This rank received a stop signal. Other ranks may not know yet."""
_armed = False
_warned = False
_was_told = False
_agreed: bool | None = None
"""Whether all ranks know of a request. None before `fleet.distribute`: no update can carry the request yet."""


def travels_with_updates() -> None:
    """Record that a model and optimizer were distributed, on every rank, whose updates carry the request from now on.

    Never undone: a discarded optimizer is collected at different times on different ranks. A rank that then asked by a collective
    of its own, while others read the answer of an update, would wait for ever."""
    global _agreed
    _agreed = bool(_agreed)


def set_agreed(*, agreed: bool) -> None:
    """Record the answer that an update brought to every rank: whether any rank received a stop signal."""
    global _agreed
    _agreed = bool(_agreed) or agreed


def was_agreed() -> bool | None:
    """Return whether all ranks know of a request; None when no update can carry it."""
    return _agreed


def tell(*, stops: bool) -> bool:
    """Return the answer to the script, and keep that it was to stop: the launcher then reports the request, and no success."""
    global _was_told
    _was_told = _was_told or stops
    return stops


def was_told() -> bool:
    """Return whether this process's script was ever told to stop."""
    return _was_told


def forget() -> None:
    """Clear the state at the end of a job."""
    global requested, _agreed
    requested, _agreed = False, None


def arm() -> None:
    """Install the signal handlers, except where the user installed one."""
    global _armed
    if _armed:
        return
    if threading.current_thread() is not threading.main_thread():
        return _warn_of_thread()
    for signum in SIGNALS:
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _on_signal)
    if LAUNCHER_PID not in os.environ and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_ctrl_c)
    _armed = True
    return None


def _warn_of_thread() -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_user(
            "fleet.should_stop() was called outside the main thread, where Python cannot set a signal handler: this process "
            "does not notice SIGTERM or SIGUSR1 itself, only requests that other ranks received. Call it once in the main "
            "thread; in a worker of Ray Train, which runs no user code there, save at regular steps instead.",
        )


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global requested
    if requested and LAUNCHER_PID not in os.environ:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    requested = True


def _on_ctrl_c(signum: int, frame: FrameType | None) -> None:
    global requested
    if requested:
        signal.default_int_handler(signum, frame)
    requested = True
    told = b"\nstopping at the script's next fleet.should_stop(); press Ctrl-C again to end at once\n"
    with contextlib.suppress(OSError):
        os.write(2, told)  # print() may be in the middle of a line of its own here
