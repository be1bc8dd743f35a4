"""Say things while a script runs, through `logging.getLogger("fleetx")`.

Where the script has configured logging (a handler on "fleetx" or on the root logger), its handlers and levels decide. Where it
has not, messages are printed on stdout among the script's own lines, and FLEETX_VERBOSE says which:

    0   warnings only
    1   one line about the run, one about each strategy, and what a strategy finds out (the default)
    2   the whole table of each strategy too

If both are there and no level is set for "fleetx", FLEETX_VERBOSE is taken for its level.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TextIO

from ..errors import ConfigError

LOGGER = logging.getLogger("fleetx")
VARIABLE = "FLEETX_VERBOSE"
LEVELS = {"0": logging.WARNING, "1": logging.INFO, "2": logging.DEBUG}
_muted = 0
"""How many `muted` blocks the script is in."""


def require_known_level() -> None:
    """Refuse a value of FLEETX_VERBOSE that means nothing. Every rank calls it: one that raised alone would leave the others."""
    given = os.environ.get(VARIABLE) or "1"
    if given not in LEVELS:
        raise ConfigError(f"{VARIABLE} is {given!r}; it must be 0 (warnings only), 1 or 2 (whole tables), or not set.")


def terminal_level() -> int:
    """Return the lowest level that is printed where the script has not configured logging."""
    return LEVELS.get(os.environ.get(VARIABLE) or "1", logging.INFO)


def shows(level: int) -> bool:
    """Return whether a message of this level would be shown or handed to a handler."""
    if _muted:
        return False
    if not LOGGER.hasHandlers():
        return level >= (LOGGER.level or terminal_level())
    return LOGGER.isEnabledFor(level) or bool(not LOGGER.level and os.environ.get(VARIABLE) and level >= terminal_level())


def say(text: object, level: int = logging.INFO, *, stream: TextIO | None = None) -> None:
    """Show a message, on this rank: most callers ask first whether it is rank 0. `stream` is where it is printed (stdout)."""
    if not shows(level):
        return
    if LOGGER.hasHandlers():
        path, line, function, _ = LOGGER.findCaller(stacklevel=2)
        LOGGER.handle(LOGGER.makeRecord(LOGGER.name, level, path, line, str(text), (), None, function))
    else:
        print(text, file=stream, flush=True)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Say nothing inside: what is only tried is no news to the user."""
    global _muted
    _muted += 1
    try:
        yield
    finally:
        _muted -= 1
