"""Find the rank that hangs. Pure functions of what was observed of each: its progress record and the state of its process.

A process that is stopped certainly hangs, so a few seconds suffice. Missing progress is a hang only if no rank makes progress:
ranks waiting in a collective are victims, a rank that is silent elsewhere is the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from ..dist.heartbeat import Phase, Progress

STOPPED_SECONDS = 3.0
CAUTION_SECONDS = 60.0
"""Silence after which a waiting is told, long before it counts as a hang: `--hang_timeout` is half an hour by default."""
GAP_SECONDS = 1.0
SHOWN_CULPRITS = 4
PLACES = {
    Phase.SCRIPT: "the user's code",
    Phase.BACKWARD: "backward",
    Phase.WAIT: "a collective",
    Phase.SAVE: "a save",
    Phase.FORWARD: "forward",
    Phase.UPDATE: "the update",
    Phase.EVALUATE: "an evaluation",
}


@dataclass(frozen=True)
class Sighting:
    """One observation of one rank."""

    progress: Progress | None
    status: str  # of the process, as psutil names it


@dataclass(frozen=True)
class Watched:
    """The last observation of a rank, and how long it has been unchanged."""

    sighting: Sighting
    silent_seconds: float = 0.0
    stopped_seconds: float = 0.0
    blocked_seconds: float = 0.0

    @property
    def waits(self) -> bool:
        return self.sighting.progress is not None and self.sighting.progress.phase is Phase.WAIT

    @property
    def step(self) -> int:
        return self.sighting.progress.step if self.sighting.progress is not None else 0


@dataclass(frozen=True)
class Hang:
    culprits: Mapping[int, str]  # why each is one: "stopped (SIGSTOP)"
    waiting: tuple[int, ...] = ()  # ranks in a collective, waiting for the culprits


def observe(before: Watched | None, seen: Sighting, elapsed_seconds: float) -> Watched:
    # Count seconds during which the launcher ran, not those on the clock: after suspending and resuming a whole job every rank
    # would seem silent for hours.
    elapsed_seconds = min(elapsed_seconds, GAP_SECONDS)
    if before is None or seen.progress != before.sighting.progress:
        return Watched(seen)
    return Watched(
        seen,
        silent_seconds=before.silent_seconds + elapsed_seconds,
        stopped_seconds=_lasting(before.stopped_seconds, before.sighting, seen, psutil.STATUS_STOPPED, elapsed_seconds),
        blocked_seconds=_lasting(before.blocked_seconds, before.sighting, seen, psutil.STATUS_DISK_SLEEP, elapsed_seconds),
    )


def _lasting(so_far: float, before: Sighting, now: Sighting, status: str, elapsed_seconds: float) -> float:
    return so_far + elapsed_seconds if before.status == now.status == status else 0.0


def judge(ranks: Mapping[int, Watched], *, hang_timeout_seconds: float, is_only_node: bool) -> Hang | None:
    """Return the hanging ranks, or None. With other nodes, ranks that all wait are not blamed: the cause may be elsewhere."""
    waiting = tuple(rank for rank, watched in ranks.items() if watched.waits)
    culprits = {
        rank: reason for rank, watched in ranks.items() if (reason := _kernel_reason(watched, hang_timeout_seconds)) is not None
    }
    if not culprits and _all_silent(ranks, hang_timeout_seconds) and (is_only_node or len(waiting) < len(ranks)):
        culprits = {rank: silence(ranks[rank]) for rank in ranks if rank not in waiting or len(waiting) == len(ranks)}
    return Hang(culprits, tuple(rank for rank in waiting if rank not in culprits)) if culprits else None


def _kernel_reason(watched: Watched, hang_timeout_seconds: float) -> str | None:
    if watched.stopped_seconds >= min(STOPPED_SECONDS, hang_timeout_seconds):
        return "stopped (SIGSTOP)"
    if watched.blocked_seconds >= hang_timeout_seconds:
        return f"in uninterruptible sleep for {watched.blocked_seconds:.0f} s"
    return None


def _all_silent(ranks: Mapping[int, Watched], hang_timeout_seconds: float) -> bool:
    """Return whether no rank makes progress. Ranks that never wrote a record count as culprits only if others wait."""
    reported = [watched for watched in ranks.values() if watched.sighting.progress is not None]
    if not reported or any(watched.silent_seconds < hang_timeout_seconds for watched in reported):
        return False
    return any(watched.waits for watched in reported) or all(watched.step >= 1 for watched in reported)


def all_wait(ranks: Mapping[int, Watched], *, hang_timeout_seconds: float) -> bool:
    """Return whether every rank here has waited for the timeout; node 0 learns of it, in case all nodes report the same."""
    return bool(ranks) and all(watched.waits and watched.silent_seconds >= hang_timeout_seconds for watched in ranks.values())


def blame_all(ranks: Mapping[int, Watched]) -> Hang:
    return Hang({rank: silence(watched) for rank, watched in ranks.items()})


def silence(watched: Watched) -> str:
    if watched.sighting.progress is None:
        return "it never reported progress"
    return f"silent for {watched.silent_seconds:.0f} s in {PLACES[watched.sighting.progress.phase]}"


def caution(ranks: Mapping[int, Watched], *, hang_timeout_seconds: float) -> Hang | None:
    """Return whom ranks of this node wait for, once no rank has moved for CAUTION_SECONDS; None where that is the limit."""
    waiting = tuple(rank for rank, watched in ranks.items() if watched.waits)
    late = {rank: silence(watched) for rank, watched in ranks.items() if not watched.waits}
    if hang_timeout_seconds <= CAUTION_SECONDS or not waiting or not late or not _all_silent(ranks, CAUTION_SECONDS):
        return None
    return Hang(late, waiting)


def describe_caution(seen: Hang, ranks: Mapping[int, Watched], *, hang_timeout_seconds: float) -> str:
    """Say who is waited for, and what happens if that goes on."""
    rank, reason = next(iter(seen.culprits.items()))
    others = f", and {len(seen.culprits) - 1} more" if len(seen.culprits) > 1 else ""
    silent = f"{reason}{_at_step(ranks[rank].step)}{others}{_waiting(seen.waiting)}"
    return f"rank {rank}: {silent}; after {hang_timeout_seconds:g} s that counts as a hang (--hang_timeout)"


def describe(hang: Hang, ranks: Mapping[int, Watched]) -> list[str]:
    """Return one line per culprit, for the first few."""
    shown = list(hang.culprits.items())[:SHOWN_CULPRITS]
    lines = [f"rank {rank} hangs: {reason}{_at_step(ranks[rank].step)}{_waiting(hang.waiting)}" for rank, reason in shown]
    hidden = len(hang.culprits) - len(shown)
    return lines + ([f"and {hidden} more ranks like these"] if hidden else [])


def _at_step(step: int) -> str:
    return f", at step {step}" if step else ""


def _waiting(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return ""
    names = ", ".join(str(rank) for rank in ranks[:8]) + (" ..." if len(ranks) > 8 else "")
    return f"; rank{'s' if len(ranks) > 1 else ''} {names} wait{'' if len(ranks) > 1 else 's'} for it"
