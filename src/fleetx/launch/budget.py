"""Decide whether a failed job is tried again, and when: so many restarts without progress, after pauses. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

WINDOW_SECONDS = 3600.0
AT_ONCE = 2
"""How many restarts in a row begin without a pause."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0


@dataclass(frozen=True)
class Limits:
    """What the user allows."""

    max_restart: int
    window_seconds: float = WINDOW_SECONDS  # an attempt with progress that ran for so long gives the whole budget back


@dataclass(frozen=True)
class Tries:
    """What was used so far. Equal on all nodes: it is part of the job."""

    spent: int = 0  # restarts since the last progress
    in_a_row: int = 0  # restarts since an attempt went beyond the steps of those before it
    best_step: int = 0  # the last step that any attempt has reached; 0 where the script does not tell


@dataclass(frozen=True)
class Retry:
    tries: Tries
    pause_seconds: float


def pause_seconds(in_a_row: int) -> float:
    """Return how long to wait before this restart of a row, counted from 1."""
    if in_a_row <= AT_ONCE:
        return 0.0
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(in_a_row - AT_ONCE - 1, 16))


def after_failure(tries: Tries, limits: Limits, *, ran_seconds: float, step: int) -> Retry | None:
    """Return the next try after an attempt that ran for so long and reached this step, or None if the budget is spent.

    A script that tells no steps makes progress by running: for the whole window."""
    went_on = step > tries.best_step
    if ran_seconds >= limits.window_seconds and (went_on or (step == 0 and tries.best_step == 0)):
        tries = Tries(best_step=tries.best_step)
    if went_on:
        tries = replace(tries, in_a_row=0, best_step=step)
    if tries.spent >= limits.max_restart:
        return None
    tries = replace(tries, spent=tries.spent + 1, in_a_row=tries.in_a_row + 1)
    return Retry(tries, pause_seconds(tries.in_a_row))
