"""Let the wall clock of one host jump: Python imports this file at its start if its folder is on the path.

The offset in seconds is the text of the file that FLEETX_SOAK_CLOCK names. The kernel's own clock stays, and the monotonic one.
"""

import os
import time


def _jump() -> None:
    path, real, real_ns = os.environ.get("FLEETX_SOAK_CLOCK"), time.time, time.time_ns
    if path is None:
        return

    def offset() -> float:
        try:
            with open(path, encoding="ascii") as file:
                return float(file.read() or 0)
        except (OSError, ValueError):
            return 0.0

    time.time = lambda: real() + offset()
    time.time_ns = lambda: real_ns() + int(offset() * 1e9)


_jump()
