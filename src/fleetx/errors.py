"""Every error a user can meet. A message says what was received, what is allowed, and what to write instead."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable
from types import FrameType

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FleetError",
    "FleetWarning",
    "LaunchError",
    "PeerError",
    "RecomputeError",
    "StrategyConflict",
]


class FleetError(Exception):
    """Base of all errors raised on purpose by this library.

    Examples:
        >>> issubclass(X.errors.ConfigError, X.errors.FleetError)
        True
    """


class ConfigError(FleetError, ValueError):
    """A setting, an argument or an environment variable that cannot be used as given.

    Examples:
        >>> fleet.DistributedStrategy(gradient_merge={"k_steps": 0})
        Traceback (most recent call last):
        ...
        fleetx.errors.ConfigError: gradient_merge_configs["k_steps"] is 0; it must be an integer of at least 1.
    """


class StrategyConflict(ConfigError):
    """Two parts of a strategy claim the same slot of a step.

    Examples:
        >>> strategy = fleet.DistributedStrategy(bf16_allreduce=True, powersgd=True)
        >>> try:
        ...     fleet.distribute(model, optimizer, strategy)
        ... except X.errors.StrategyConflict as conflict:
        ...     print(conflict)
        bf16_allreduce and powersgd both claim `reduce`. ...
    """


class DataError(FleetError):
    """A data file or a sample that cannot be used.

    Examples:
        >>> issubclass(X.errors.DataError, X.errors.FleetError)
        True
    """


class CheckpointError(FleetError):
    """A checkpoint that is damaged, or that belongs to another run.

    Examples:
        >>> issubclass(X.errors.CheckpointError, X.errors.FleetError)
        True
    """

    storage_code: int | None = None
    """The operating system's number of the error, where storage has failed (0: not known); None: the script or the files are at
    fault."""


class LaunchError(FleetError):
    """Workers that could not be started.

    Examples:
        >>> issubclass(X.errors.LaunchError, X.errors.FleetError)
        True
    """


class PeerError(FleetError):
    """A collective that failed, since another rank has left or is elsewhere. No RuntimeError, by which loops skip batches.

    Examples:
        >>> issubclass(X.errors.PeerError, RuntimeError)  # a loop that skips bad batches must not catch it
        False
    """


class RecomputeError(FleetError):
    """A module that cannot be computed again in backward.

    Examples:
        >>> X.errors.RecomputeError("layer1 differs in backward", unit="layer1").unit
        'layer1'
    """

    def __init__(self, text: str, *, unit: str) -> None:
        super().__init__(text)
        self.unit = unit


class FleetWarning(UserWarning):
    """Something works, but probably not as intended.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("error", X.errors.FleetWarning)  # every warning of FleetX ends the script
    """


def warn_user(text: str) -> None:
    """Warn at the line of the user's script that led here: the nearest one outside of this library and of torch."""
    frame, level = _user_frame()
    warnings.warn(text, FleetWarning, stacklevel=level if frame is not None else 2)


def user_line() -> str:
    """Return file and line of the user's script that led here; empty where there is none."""
    frame, _ = _user_frame()
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _user_frame() -> tuple[FrameType | None, int]:
    """Return the nearest frame outside of this library and of torch, and its level as the caller counts for `warnings.warn`."""
    frame: FrameType | None = sys._getframe(2)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_libraries()):
        frame, level = frame.f_back, level + 1
    return frame, level


def _libraries() -> tuple[str, ...]:
    found = [os.path.dirname(os.path.abspath(__file__)) + os.sep]
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__ is not None:
        found.append(os.path.dirname(torch.__file__) + os.sep)
    return *found, "<frozen "


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """Return a sentence such as " Did you mean `localsgd`?", or nothing when no known name is near."""
    near = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.6)
    return f" Did you mean `{near[0]}`?" if near else ""


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
