"""Identify this start of the machine's kernel: host names repeat, and process ids begin again."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path


def boot_name() -> str:
    """Return an identifier of this start of the machine's kernel, or the host's name where there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
