"""Fewer points, so that a page stays small: the least and the greatest of every column of pixels stay, so spikes do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import itemgetter

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
