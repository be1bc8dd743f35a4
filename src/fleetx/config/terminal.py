"""The terminal that a script's lines go to: its own, or under fleetrun the one whose path rank 0 is given."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO

TERMINAL = "FLEETX_TTY"
"""Variable by which fleetrun gives rank 0 the path of its terminal: the rank's own output goes to a log."""
COLUMNS = 80


def columns_of(file: IO[str]) -> int:
    """Return the terminal's width; some terminals report 0, and COLUMNS or a default is used."""
    wanted = os.environ.get("COLUMNS", "")
    return os.get_terminal_size(file.fileno()).columns or (int(wanted) if wanted.isdecimal() and int(wanted) else COLUMNS)


def is_terminal(file: IO[str]) -> bool:
    return file.isatty() and os.environ.get("TERM") != "dumb"


def launchers_terminal() -> IO[str] | None:
    """Open fleetrun's terminal; None without one, or if it is closed by now or belongs to another container."""
    path = os.environ.get(TERMINAL)
    if path is None or os.environ.get("TERM") == "dumb":
        return None
    with contextlib.suppress(OSError):
        return open(os.open(path, os.O_RDWR | os.O_NOCTTY), "w", encoding="utf-8")
    return None


def own_terminal() -> bool:
    """Return whether this script's output is a terminal of its own, where no launcher shows it."""
    return TERMINAL not in os.environ and is_terminal(sys.stdout)
