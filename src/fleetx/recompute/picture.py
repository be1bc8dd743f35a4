"""A picture of memory over one step: forward from left to right, then backward, piece by piece, under the budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .profile import Profile, passings
from .solve import Solution


@dataclass(frozen=True, slots=True)
class Moment:
    """A call of a unit, or glue, in forward or in backward."""

    unit: str
    """Its name; empty for glue."""
    is_backward: bool
    is_again: bool
    """It is computed again."""
    kept_bytes: int
    """By it and all before it, for a backward to come."""
    peak_bytes: int
    """All that is in use at the most while it runs."""
    parks: bool = False
    """It has inputs in host memory from its forward to its backward."""


def moments(profile: Profile, solution: Solution) -> tuple[Moment, ...]:
    """As foretold by the profile, there and back."""
    there: list[Moment] = []
    back: list[Moment] = []
    for passing in passings(profile, solution.again, solution.joins, solution.parks):
        unit, kept = passing.element.unit, passing.kept.all
        name = "" if unit is None else profile.units[unit]
        again, parks = unit in solution.again, unit in solution.parks
        there.append(Moment(name, False, again, kept, passing.forward, parks))
        back.append(Moment(name, True, again, kept, passing.backward, parks))
    return (*there, *reversed(back))


def draw(path: str | os.PathLike[str], steps: Sequence[Moment], budget: int) -> None:
    """As PNG, SVG or PDF, by the path's ending."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('a picture needs matplotlib: pip install "fleetx[demo]".') from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    turning = len(steps) // 2  # the last glue of forward and the first of backward: the loss
    shown = [step for place, step in enumerate(steps) if step.unit or place in (turning - 1, turning)]
    places = range(len(shown))
    axes.bar(places, [step.peak_bytes / 1e6 for step in shown], 1.0, color="#c9d7e8", label="in use, at the most")
    axes.bar(places, [step.kept_bytes / 1e6 for step in shown], 1.0, color="#4878a8", label="kept for backward")
    for place, step in enumerate(shown):
        if step.is_again:
            axes.axvspan(place - 0.5, place + 0.5, ymax=0.02, color="#d1495b")
    axes.axhline(budget / 1e6, color="#d1495b", linestyle="--", label="budget")
    turn = next((place for place, step in enumerate(shown) if step.is_backward), len(shown))
    axes.axvline(turn - 0.5, color="#555555", linewidth=1)
    named = [place for place, step in enumerate(shown) if step.unit]
    axes.set_xticks(named, [shown[place].unit for place in named], rotation=90, fontsize=6)
    axes.set(ylabel="MB", title="One step: forward, then backward (red marks: computed again)")
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path)
