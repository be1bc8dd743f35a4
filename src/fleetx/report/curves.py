"""Make the series that are drawn from the updates of a run, and thin them so that a page stays small: pure functions."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from .facts import SAMPLES, STEPS, has_samples, rate_of
from .metrics import Update
from .read import Run

Point = tuple[float, float | None]
"""Place and value; None is a gap in the line."""
COLUMNS = 360
PARTS = ("data", "forward", "backward", "communication", "update", "other")
RATE_WINDOWS, SPLIT_WINDOWS = 80, 60
LEAST_PERIODS = 4


def in_columns(points: Sequence[Point], columns: int) -> Iterator[Sequence[Point]]:
    """Cut points in rising order into columns of equal width, without the empty ones."""
    low, high = points[0][0], points[-1][0]
    begin = 0
    for column in range(1, columns + 1):
        border = low + (high - low) * column / columns
        end = bisect_left(points, border, begin, key=itemgetter(0)) if column < columns else len(points)
        if end > begin:
            yield points[begin:end]
        begin = end


def thin(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """Keep the least and the greatest point of each column, so that spikes stay, and always the first and the last."""
    if len(points) <= 2 * columns:
        return list(points)
    kept: list[Point] = [points[0]]
    for group in in_columns(points, columns):
        known = [(value, place) for place, value in group if value is not None]
        ends = {min(known), max(known)} if known else set()
        kept += sorted((place, value) for value, place in ends) or [group[0]]
    kept.append(points[-1])
    return [point for place, point in enumerate(kept) if place == 0 or point[0] > kept[place - 1][0]]


def means(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """Return the mean of each column at its middle, from which smoothed lines are made: extremes alone would mislead."""
    middles: list[Point] = []
    for group in in_columns(points, columns) if points else ():
        known = [value for _, value in group if value is not None]
        middle = (group[0][0] + group[-1][0]) / 2
        middles.append((middle, sum(known) / len(known) if known else None))
    return middles


@dataclass(frozen=True)
class Track:
    """One line of a chart: a run, or one of its pairs of model and optimizer."""

    place: int
    run: Run
    name: str
    updates: Sequence[Update]


def model_name(run: Run, pair: int) -> str:
    pairs = run.starts[-1].get("pairs") if run.starts else None
    one = pairs[pair - 1] if isinstance(pairs, list) and 0 < pair <= len(pairs) else None
    return str(one["model"]) if isinstance(one, dict) and one.get("model") else f"pair {pair}"


def tracks_of(runs: Sequence[Run]) -> list[Track]:
    tracks: list[Track] = []
    for run in runs:
        models = [model_name(run, pair) for pair in run.updates]
        for (pair, updates), model in zip(run.updates.items(), models, strict=True):
            own = model if models.count(model) == 1 else f"{model} {pair}"
            name = run.name if len(models) == 1 else (own if len(runs) == 1 else f"{run.name} · {own}")
            tracks.append(Track(len(tracks), run, name, updates))
    return tracks


def known(updates: Sequence[Update], name: str) -> list[Point]:
    """Return the points of a field, without the updates where it is None: the line goes on over them."""
    points = ((update.step, getattr(update, name)) for update in updates)
    return [(step, value) for step, value in points if value is not None]


def with_gaps(updates: Sequence[Update], name: str) -> list[Point]:
    """Return the points of a field, with None where it was not finite; no points if it never was."""
    points: list[Point] = [(update.step, getattr(update, name)) for update in updates]
    return points if any(value is not None for _, value in points) else []


def user_values(updates: Sequence[Update], name: str) -> list[Point]:
    return [(update.step, update.values[name]) for update in updates if name in update.values]


def value_names(tracks: Sequence[Track]) -> list[str]:
    return list(dict.fromkeys(name for track in tracks for update in track.updates for name in update.values))


def windows(updates: Sequence[Update], most: int) -> Iterator[Sequence[Update]]:
    """Group neighbouring updates into at most `most` windows. Each holds whole periods of Local SGD: one averaging in a window
    and two in the next would look like a change."""
    period = int(max((update.period or 1.0 for update in updates), default=1.0))
    size = max(1, -(-len(updates) // most))
    size = -(-size // period) * period if len(updates) >= LEAST_PERIODS * period else size
    for begin in range(0, len(updates), size):
        yield updates[begin : begin + size]


def rate_unit(tracks: Sequence[Track]) -> str:
    """Choose the unit that all lines of a chart can be shown in."""
    return SAMPLES if all(has_samples(track.updates) for track in tracks) else STEPS


def throughput(updates: Sequence[Update], unit: str) -> list[Point]:
    """Return the rate of each window, counting the time since the last update of the window before."""
    points: list[Point] = []
    before: list[Update] = []
    for window in windows(updates, RATE_WINDOWS):
        rate = rate_of([*before, *window], unit)
        if rate is not None:
            points.append((window[-1].step, rate))
        before = [window[-1]]
    return points


def split_means(updates: Sequence[Update]) -> list[tuple[float, dict[str, float]]]:
    """Return the mean seconds of each part of an update, by window of steps."""
    points = []
    for window in windows([update for update in updates if update.split], SPLIT_WINDOWS):
        points.append(((window[0].step + window[-1].step) / 2, mean_split(window)))
    return points


def mean_split(updates: Sequence[Update]) -> dict[str, float]:
    having = [update.split for update in updates if update.split]
    names = dict.fromkeys([*PARTS, *(name for split in having for name in split)])
    means = {name: sum(split.get(name, 0.0) for split in having) / len(having) for name in names} if having else {}
    return {name: seconds for name, seconds in means.items() if any(name in split for split in having)}


def ratio_curve(updates: Sequence[Update], of: Callable[[list[float]], float]) -> list[Point]:
    """Reduce the trust ratios of all layers to one number, at each step that logged them."""
    return [(update.step, of(list(update.trust_ratios.values()))) for update in updates if update.trust_ratios]


RATIO_CURVES: dict[str, Callable[[list[float]], float]] = {"max": max, "median": statistics.median, "min": min}


def not_finite(points: Sequence[Point]) -> tuple[int, int] | None:
    """Return the number of gaps and the step of the first; None without gaps."""
    gaps = [int(step) for step, value in points if value is None]
    return (len(gaps), gaps[0]) if gaps else None


def moved(points: Sequence[Point]) -> bool:
    return len({value for _, value in points}) > 1


def step_gap(updates: Sequence[Update]) -> int:
    """Return the median distance between logged updates, in steps."""
    gaps = [later.step - earlier.step for earlier, later in pairwise(updates)]
    return int(statistics.median(gaps)) if gaps else 1


def resumed_at(run: Run) -> list[int]:
    """Return the first step of each resumed start that was not itself superseded."""
    steps: list[int] = []
    for updates in run.updates.values():
        steps += [later.step for earlier, later in pairwise(updates) if later.start != earlier.start]
    return sorted(set(steps))


def shared_dense(tracks: Sequence[Track]) -> Track | None:
    """Return the longest track if dense updates would send the same in all: its line then stands for every run."""
    each = [track.updates[-1].total_dense / max(1, track.updates[-1].step - track.updates[0].step + 1) for track in tracks]
    if len(tracks) < 2 or min(each) < 0.999 * max(each):
        return None
    return max(tracks, key=lambda track: track.updates[-1].step)


def sending(tracks: Sequence[Track]) -> list[Track]:
    """Return the tracks of runs with more than one rank."""
    return [track for track in tracks if track.updates and track.updates[-1].total_dense > 0]
