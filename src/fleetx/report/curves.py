"""Fewer points, so that a page stays small: the least and the greatest of every column of pixels stay, so spikes do.

The series of a run that are drawn, made from its updates: pure functions."""

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
"""A place and a value; None is a gap in the line."""
COLUMNS = 360


def in_columns(points: Sequence[Point], columns: int) -> Iterator[Sequence[Point]]:
    """Points in rising order, cut into columns of equal width; empty ones are left out."""
    low, high = points[0][0], points[-1][0]
    begin = 0
    for column in range(1, columns + 1):
        border = low + (high - low) * column / columns
        end = bisect_left(points, border, begin, key=itemgetter(0)) if column < columns else len(points)
        if end > begin:
            yield points[begin:end]
        begin = end


def thin(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """At most about two of each column, in the order they were in, and always the first and the last."""
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
    """The mean of each column at its middle: what a smoothed line is made of, since extremes alone would mislead it."""
    found: list[Point] = []
    for group in in_columns(points, columns) if points else ():
        known = [value for _, value in group if value is not None]
        middle = (group[0][0] + group[-1][0]) / 2
        found.append((middle, sum(known) / len(known) if known else None))
    return found


PARTS = ("data", "forward", "backward", "communication", "update", "other")
RATE_WINDOWS, SPLIT_WINDOWS = 80, 60
LEAST_PERIODS = 4


@dataclass(frozen=True)
class Track:
    """One line of a chart: a run, or one pair of model and optimizer of it."""

    place: int
    run: Run
    name: str
    updates: Sequence[Update]


def model_name(run: Run, pair: int) -> str:
    pairs = run.starts[-1].get("pairs") if run.starts else None
    one = pairs[pair - 1] if isinstance(pairs, list) and 0 < pair <= len(pairs) else None
    return str(one["model"]) if isinstance(one, dict) and one.get("model") else f"pair {pair}"


def tracks_of(runs: Sequence[Run]) -> list[Track]:
    found: list[Track] = []
    for run in runs:
        models = [model_name(run, pair) for pair in run.updates]
        for (pair, updates), model in zip(run.updates.items(), models, strict=True):
            told = model if models.count(model) == 1 else f"{model} {pair}"
            name = run.name if len(models) == 1 else (told if len(runs) == 1 else f"{run.name} · {told}")
            found.append(Track(len(found), run, name, updates))
    return found


def known(updates: Sequence[Update], name: str) -> list[Point]:
    """Updates that say something about it: lines go on over those that do not."""
    found = ((one.step, getattr(one, name)) for one in updates)
    return [(step, value) for step, value in found if value is not None]


def with_gaps(updates: Sequence[Update], name: str) -> list[Point]:
    """A None stays where a number was to be: it was not finite. All None is no series."""
    found: list[Point] = [(one.step, getattr(one, name)) for one in updates]
    return found if any(value is not None for _, value in found) else []


def user_values(updates: Sequence[Update], name: str) -> list[Point]:
    return [(one.step, one.values[name]) for one in updates if name in one.values]


def value_names(tracks: Sequence[Track]) -> list[str]:
    return list(dict.fromkeys(name for track in tracks for one in track.updates for name in one.values))


def windows(updates: Sequence[Update], most: int) -> Iterator[Sequence[Update]]:
    """Neighbours together, so that there are at most so many groups. Whole periods of Local SGD: one averaging in a window and
    two in the next would look like a change."""
    period = int(max((one.period or 1.0 for one in updates), default=1.0))
    size = max(1, -(-len(updates) // most))
    size = -(-size // period) * period if len(updates) >= LEAST_PERIODS * period else size
    for begin in range(0, len(updates), size):
        yield updates[begin : begin + size]


def rate_unit(tracks: Sequence[Track]) -> str:
    """One for all lines of a chart."""
    return SAMPLES if all(has_samples(track.updates) for track in tracks) else STEPS


def throughput(updates: Sequence[Update], unit: str) -> list[Point]:
    """Of windows that each begin with the last update of the one before: the time between the two counts."""
    found: list[Point] = []
    before: list[Update] = []
    for window in windows(updates, RATE_WINDOWS):
        rate = rate_of([*before, *window], unit)
        if rate is not None:
            found.append((window[-1].step, rate))
        before = [window[-1]]
    return found


def split_means(updates: Sequence[Update]) -> list[tuple[float, dict[str, float]]]:
    """Mean seconds of each part of an update, by windows of steps."""
    found = []
    for window in windows([one for one in updates if one.split], SPLIT_WINDOWS):
        found.append(((window[0].step + window[-1].step) / 2, mean_split(window)))
    return found


def mean_split(updates: Sequence[Update]) -> dict[str, float]:
    having = [one.split for one in updates if one.split]
    names = dict.fromkeys([*PARTS, *(name for split in having for name in split)])
    means = {name: sum(split.get(name, 0.0) for split in having) / len(having) for name in names} if having else {}
    return {name: seconds for name, seconds in means.items() if any(name in split for split in having)}


def ratio_curve(updates: Sequence[Update], of: Callable[[list[float]], float]) -> list[Point]:
    """One number of all layers' trust ratios, wherever they were logged."""
    return [(one.step, of(list(one.trust_ratios.values()))) for one in updates if one.trust_ratios]


RATIO_CURVES: dict[str, Callable[[list[float]], float]] = {"max": max, "median": statistics.median, "min": min}


def not_finite(points: Sequence[Point]) -> tuple[int, int] | None:
    """How many gaps there are, and the step of the first."""
    gaps = [int(step) for step, value in points if value is None]
    return (len(gaps), gaps[0]) if gaps else None


def moved(points: Sequence[Point]) -> bool:
    return len({value for _, value in points}) > 1


def step_gap(updates: Sequence[Update]) -> int:
    """Updates between two logged ones, as a rule."""
    gaps = [later.step - earlier.step for earlier, later in pairwise(updates)]
    return int(statistics.median(gaps)) if gaps else 1


def resumed_at(run: Run) -> list[int]:
    """First steps of the starts after the first, as far as they still count."""
    found: list[int] = []
    for updates in run.updates.values():
        found += [later.step for earlier, later in pairwise(updates) if later.start != earlier.start]
    return sorted(set(found))


def shared_dense(tracks: Sequence[Track]) -> Track | None:
    """The longest track, where a dense update would send the same in all: one line then stands for every run."""
    each = [track.updates[-1].total_dense / max(1, track.updates[-1].step - track.updates[0].step + 1) for track in tracks]
    if len(tracks) < 2 or min(each) < 0.999 * max(each):
        return None
    return max(tracks, key=lambda track: track.updates[-1].step)


def sending(tracks: Sequence[Track]) -> list[Track]:
    """Those of more than one rank."""
    return [track for track in tracks if track.updates and track.updates[-1].total_dense > 0]
