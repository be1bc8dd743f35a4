"""Which rank the others waited for. In a collective all wait for the last, so the last to come communicates least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .metrics import RankTimes, Update, rank_times
from .read import Run
from .words import share, short_time

NOTICED = 0.02
"""Of an update's time: less is not told as waiting."""


@dataclass(frozen=True)
class Waiting:
    rank: int
    seconds: float
    """Of a step, that the one that waited most waited longer."""
    step_seconds: float
    cause: str
    """"compute" or "data": where that rank spent more than the others."""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def a_step(total: Mapping[int, RankTimes], step_seconds: float) -> dict[int, RankTimes]:
    """Of one update that takes so long. By shares: each rank tells when it may, so that sums are not of the very same updates."""
    scales = {rank: step_seconds / one.seconds for rank, one in total.items() if one.seconds > 0}
    return {
        rank: RankTimes(step_seconds, *(scales[rank] * part for part in (one.compute, one.communication, one.data)))
        for rank, one in sorted(total.items())
        if rank in scales
    }


def added(one: RankTimes | None, other: RankTimes) -> RankTimes:
    if one is None:
        return other
    return RankTimes(
        one.seconds + other.seconds,
        one.compute + other.compute,
        one.communication + other.communication,
        one.data + other.data,
    )


def mean_step(updates: Sequence[Update]) -> float:
    """Seconds of an update of worker 0."""
    wholes = [sum(one.split.values()) for one in updates if one.split]
    return mean(wholes) if wholes else 0.0


def times_by_rank(run: Run) -> dict[int, RankTimes]:
    """Of one update, from what the updates told; from the summary where they told nothing."""
    total: dict[int, RankTimes] = {}
    for update in run.all_updates:
        for rank, times in (update.ranks or {}).items():
            total[rank] = added(total.get(rank), times)
    if not total and run.summary is not None:
        total = rank_times(run.summary.get("ranks")) or {}
    return a_step(total, mean_step(run.all_updates))


def waited_for(times: Mapping[int, RankTimes]) -> Waiting | None:
    """None: fewer than two ranks."""
    if len(times) < 2:
        return None
    rank = min(times, key=lambda one: times[one].communication)
    own, others = times[rank], [one for place, one in times.items() if place != rank]
    more_data = own.data - mean([one.data for one in others])
    more_compute = own.compute - mean([one.compute for one in others])
    return Waiting(
        rank,
        max(one.communication for one in others) - own.communication,
        own.seconds,
        "data" if more_data > more_compute else "compute",
    )


def waiting_words(times: Mapping[int, RankTimes]) -> str | None:
    found = waited_for(times)
    if found is None:
        return None
    if found.seconds < NOTICED * found.step_seconds:
        return f"No worker kept the others waiting for more than {NOTICED:.0%} of a step."
    why = "it took longer over data and script" if found.cause == "data" else "it computed longer"
    return (
        f"Worker {found.rank} kept the others waiting {short_time(found.seconds)} a step "
        f"({share(found.seconds, found.step_seconds)} of it): {why}."
    )


def waits_over_steps(run: Run) -> dict[int, list[tuple[int, float]]]:
    """By rank: seconds of a step that it waited less than the one that waited most, wherever the ranks were told of."""
    found: dict[int, list[tuple[int, float]]] = {}
    for updates in run.updates.values():
        begin = 0
        for place, update in enumerate(updates):
            if not update.ranks:
                continue
            times = a_step(update.ranks, mean_step(updates[begin : place + 1]))
            begin = place + 1
            for rank, one in times.items():
                most = max(other.communication for other in times.values())
                found.setdefault(rank, []).append((update.step, most - one.communication))
    return dict(sorted(found.items()))
