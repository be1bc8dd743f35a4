"""Draw an update's time by the number of ranks, one line for each reducer, named where it ends."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .what_if import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#333333", "#4878a8", "#7a5195", "#d1495b", "#edae49", "#66a182")
GAP = 0.055
"""Least distance between the names of two lines, as a share of the picture's height."""


def require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError('a chart needs matplotlib: pip install "fleetx[demo]".') from None


def draw(path: str | os.PathLike[str], curves: Sequence[Curve], title: str) -> None:
    """Write the picture as PNG or SVG, by the path's ending."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for curve, colour in zip(curves, itertools.cycle(COLOURS), strict=False):
        worlds = sorted(curve.seconds)
        style = "-" if curve.is_measured else "--"
        axes.plot(worlds, [1e3 * curve.seconds[world] for world in worlds], style, color=colour, linewidth=1.8)
    worlds = sorted({world for curve in curves for world in curve.seconds})
    axes.set_xlim(worlds[0], worlds[-1])
    axes.set_xticks(worlds[::2], [f"{world:,}" for world in worlds[::2]])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="ranks", ylabel="ms of an update")
    axes.set_title(title, fontsize=9, loc="left")
    _tick_times(axes)
    _name_lines(axes, curves)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"the chart cannot be written to {path}: {error}.") from None


def _tick_times(axes: Axes) -> None:
    """Label 1, 2, 5, 10, ... in plain numbers: times may be far less than ten times apart, and powers of ten would name none."""
    low, high = axes.get_ylim()
    ticks = [digit * 10.0**power for power in range(-6, 10) for digit in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(inside, [f"{tick:,g}" for tick in inside])
    axes.set_ylim(low, high)


def _name_lines(axes: Axes, curves: Sequence[Curve]) -> None:
    heights = [_height(axes, curve) for curve in curves]
    for curve, colour, place, end in zip(curves, itertools.cycle(COLOURS), spread(heights, gap=GAP), heights, strict=False):
        name = curve.name + ("" if curve.is_measured else " (work not measured)")
        axes.annotate(
            name,
            (1.0, end),
            (1.03, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0},
        )


def _height(axes: Axes, curve: Curve) -> float:
    """Return the height of a line's end, as a share of the picture's height."""
    last = (max(curve.seconds), 1e3 * curve.seconds[max(curve.seconds)])
    return float(axes.transAxes.inverted().transform(axes.transData.transform(last))[1])


def spread(heights: Sequence[float], *, gap: float) -> list[float]:
    """Move heights that are nearer than the gap apart about their middle; the order stays."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    groups: list[list[int]] = []
    for place in order:
        groups.append([place])
        while len(groups) > 1 and _bounds(groups[-2], heights, gap)[1] + gap > _bounds(groups[-1], heights, gap)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    found = list(heights)
    for group in groups:
        low, _ = _bounds(group, heights, gap)
        for step, place in enumerate(group):
            found[place] = low + step * gap
    return found


def _bounds(group: Sequence[int], heights: Sequence[float], gap: float) -> tuple[float, float]:
    middle = sum(heights[place] for place in group) / len(group)
    half = gap * (len(group) - 1) / 2
    return middle - half, middle + half
