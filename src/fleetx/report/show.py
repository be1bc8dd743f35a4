"""What all sections of the page are made from, and with: the runs, their horizontal axes, charts over the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import curves
from .axis import exact
from .curves import Track
from .facts import Facts
from .line_chart import Chart, Horizontal, Line, Shape, line_chart
from .markup import Markup, join, tag
from .read import Run
from .thinning import Point
from .words import BYTES, LONG_TIMES, unit_for


@dataclass(frozen=True)
class Show:
    """What all sections are made from."""

    runs: Sequence[Run]
    facts: Sequence[Facts]
    tracks: Sequence[Track]
    across: Sequence[Horizontal]
    """Ways to lay the steps out: by step, by time, by bytes. Empty where no update was logged."""

    @property
    def marks(self) -> list[tuple[str, float]]:
        """Where a run was resumed: of one run only, or they would not be told apart."""
        return [("resumed", float(step)) for step in curves.resumed_at(self.runs[0])] if len(self.runs) == 1 else []


def layouts(tracks: Sequence[Track]) -> list[Horizontal]:
    """The horizontal axes that the runs have numbers for; the first is the one that is shown."""
    having = [track for track in tracks if track.updates]
    if not having:
        return []
    steps = [track.updates[place].step for track in having for place in (0, -1)]
    found = [Horizontal("step", "step", exact(min(steps), max(steps), whole=True))]
    seconds = [one.total_seconds for track in having for one in track.updates if one.total_seconds is not None]
    sent = [track.updates[-1].total_sent for track in having]
    for key, name, most, units in (
        ("seconds", "time", max(seconds, default=0.0), LONG_TIMES),
        ("bytes", "sent by worker 0", max(sent), BYTES),
    ):
        if most > 0:
            unit = unit_for(most, units)
            found.append(Horizontal(key, f"{name} ({unit.name})", exact(0.0, most, unit=unit)))
    return found


def line_of(track: Track, points: Sequence[Point], **more: Any) -> Line:
    return replace(Line(track.place, track.name, points, track.place), **more)


def gap_notes(lines: Sequence[Line], what: str) -> list[str]:
    """Where a number was missing or not finite."""
    told = []
    for line in lines:
        gaps = curves.not_finite(line.points)
        if gaps is not None:
            count, first = gaps
            times = "once" if count == 1 else f"{count:,} times"
            whose = f"{line.name}: " if len(lines) > 1 else ""
            told.append(f"{whose}{what} was missing or not finite {times}, first at step {first:,}.")
    return told


def over_steps(show: Show, key: str, title: str, lines: Sequence[Line], **more: Any) -> Markup | None:
    """A chart that may be laid out by step, time or bytes."""
    if not show.across:
        return None
    chart = Chart(key, title, lines, show.across, marks=show.marks, is_named=len(show.tracks) > 1)
    return line_chart(replace(chart, **more))


def simple_chart(
    show: Show, key: str, title: str, points: Callable[[Track], list[Point]], *, shape: Shape = "line", **more: Any
) -> Markup | None:
    """One line for each track."""
    return over_steps(show, key, title, [line_of(track, points(track), shape=shape) for track in show.tracks], **more)


def is_wide(chart: Markup) -> bool:
    return chart.startswith('<figure class="chart wide"')


def section(title: str, *children: Markup | None, key: str, is_grid: bool = True) -> Markup | None:
    there = [child for child in children if child]
    if not there:
        return None
    if is_grid and sum(not is_wide(child) for child in there) % 2:  # no hole in a page of two columns
        first = next(place for place, child in enumerate(there) if not is_wide(child))
        there[first] = tag("div", there[first], class_="wide")
    body = tag("div", *there, class_="grid-of-charts") if is_grid else join(*there)
    return tag("section", tag("h2", title), body, id=key)
