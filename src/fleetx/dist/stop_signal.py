"""A polite request to stop: SIGTERM or SIGUSR1, noted here and acted on at an update boundary, on all ranks together.

Nothing is installed until a script first asks `fleet.should_stop()`: one that never asks dies of these signals as any does.
A second signal ends the process at once; under fleetrun that is the launcher's to decide, since a cluster manager may well
signal both the launcher, which passes it on, and the workers.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from ..errors import warn_user

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LAUNCHER_PID = "FLEETX_LAUNCHER_PID"

_requested = False
_armed = False
_warned = False
_agreed: bool | None = None
"""Whether all ranks know. None in a job that has made no pair, whose updates could carry the request."""


def is_requested() -> bool:
    """Whether this rank was asked to stop. The others may not know yet."""
    return _requested


def travels_with_updates() -> None:
    """A pair was made, on every rank. Never taken back: when a discarded pair is collected differs from rank to rank, and one
    that asks the others in a collective of its own while these look at what an update brought would wait for ever."""
    global _agreed
    _agreed = bool(_agreed)


def heed(*, agreed: bool) -> None:
    """An update brought this answer, to every rank."""
    global _agreed
    _agreed = bool(_agreed) or agreed


def was_agreed() -> bool | None:
    return _agreed


def forget() -> None:
    """The job is over."""
    global _requested, _agreed
    _requested, _agreed = False, None


def arm() -> None:
    """From now on a request is noted. A handler of the user's own is left alone."""
    global _armed
    if _armed:
        return
    if threading.current_thread() is not threading.main_thread():
        return _warn_of_thread()
    for signum in SIGNALS:
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _on_signal)
    _armed = True
    return None


def _warn_of_thread() -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_user(
            "fleet.should_stop() is asked outside the main thread, where Python lets nobody set a signal handler: this process "
            "notes no SIGTERM or SIGUSR1, and hears only of those that other ranks note. Ask once in the main thread; in a "
            "worker of Ray Train, which has no such place, save at regular steps instead.",
        )


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global _requested
    if _requested and LAUNCHER_PID not in os.environ:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    _requested = True
