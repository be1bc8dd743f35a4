"""Every error a user can meet. A message says what was received, what is allowed, and what to write instead."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable
from types import FrameType


class FleetError(Exception):
    """Base of all errors raised on purpose by this library."""


class ConfigError(FleetError, ValueError):
    """A setting, an argument or an environment variable that cannot be used as given."""


class StrategyConflict(ConfigError):
    """Two parts of a strategy claim the same slot of a step."""


class DataError(FleetError):
    """A data file or a sample that cannot be used."""


class CheckpointError(FleetError):
    """A checkpoint that is damaged, or that belongs to another run."""

    storage_code: int | None = None
    """The operating system's number of the error, where storage has failed (0: not known); None: the script or the files are at
    fault."""


class LaunchError(FleetError):
    """Workers that could not be started."""


class PeerError(FleetError):
    """A collective that failed, since another rank has left or is elsewhere. No RuntimeError, by which loops skip batches."""


class RecomputeError(FleetError):
    """A module that cannot be computed again in backward."""

    def __init__(self, text: str, *, unit: str) -> None:
        super().__init__(text)
        self.unit = unit


class FleetWarning(UserWarning):
    """Something works, but probably not as intended."""


def warn_user(text: str) -> None:
    """Warn at the line of the user's script that led here: the nearest one outside of this library and of torch."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_libraries()):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, FleetWarning, stacklevel=level if frame is not None else 2)


def _libraries() -> tuple[str, ...]:
    found = [os.path.dirname(os.path.abspath(__file__)) + os.sep]
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__ is not None:
        found.append(os.path.dirname(torch.__file__) + os.sep)
    return *found, "<frozen "


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """A sentence such as " Did you mean `localsgd`?", or nothing when no known name is near."""
    near = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.6)
    return f" Did you mean `{near[0]}`?" if near else ""


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
