"""Draw a chart of lines: SVG that stretches with its box, and labels beside it in HTML, so that text keeps its size.

Both scales and all horizontal axes are written here; page.js shows one of them, and redraws the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .axis import MEMORY, PLAIN, Axis, Unit, logarithmic, plain, straight, unit_for
from .curves import Point, means, thin
from .markup import Markup, data, join, tag

WIDTH, HEIGHT = 2000, 1000
COLOURS = 8
LEAST_SPAN = 0.02
NEAR_MARKS = 0.2
MEANS = 180
SPARSE = 40
"""A line of no more points shows each of them; page.js has the same number."""
Shape = Literal["line", "steps", "dots"]


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    track: int
    """Place of the track it belongs to, with which it is hidden."""
    name: str
    points: Sequence[Point]
    colour: int
    shape: Shape = "line"
    is_dashed: bool = False
    is_of_all: bool = False
    """Whether it stays when its run is hidden."""


@dataclass(frozen=True)
class Horizontal:
    """One horizontal axis of a chart: steps, time or bytes."""

    key: str
    caption: str
    axis: Axis


@dataclass(frozen=True)
class Chart:
    """What `line_chart` draws."""

    key: str
    title: str
    lines: Sequence[Line]
    across: Sequence[Horizontal]
    units: Sequence[Unit] = (PLAIN,)
    caption: str = ""
    from_zero: bool = False
    starts_log: bool = False
    is_smoothed: bool = True
    marks: Sequence[tuple[str, float]] = ()
    """Names and places of vertical lines."""
    notes: Sequence[str] = ()
    is_named: bool = False
    """Whether a single line has a legend too: other runs are shown, which have no such line."""


def number_json(value: float | None) -> float | int | None:
    """Shorten a number to six significant digits, more than a pixel shows."""
    if value is None:
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def path(points: Sequence[Point], place: Callable[[float, float], tuple[int, int]], shape: Shape, *, is_log: bool) -> str:
    """Return the `d` of an SVG path. A gap lifts the pen; a point alone between gaps is a dot."""
    pieces: list[str] = []
    is_down, drawn = False, 0
    last = (-1, -1)
    for x, y in points:
        if y is None or (is_log and y <= 0):
            pieces += ["h0"] if is_down and drawn == 1 else []
            is_down = False
            continue
        at = place(x, y)
        if not is_down or shape == "dots":
            pieces.append(f"M{at[0]} {at[1]}" + ("h0" if shape == "dots" else ""))
            is_down, drawn = True, 1
        elif at != last:
            pieces.append(f"H{at[0]}V{at[1]}" if shape == "steps" else f"L{at[0]} {at[1]}")
            drawn += 1
        last = at
    pieces += ["h0"] if is_down and drawn == 1 and shape != "dots" else []
    return "".join(pieces)


def vertical_axes(lines: Sequence[Line], chart: Chart) -> tuple[Axis, Axis | None]:
    """Return the straight axis, and a logarithmic one (None if a value is negative, or all are nearly the same)."""
    values = [value for line in lines for _, value in line.points if value is not None]
    low, high = min(values), max(values)
    unit = unit_for(max(abs(low), abs(high)), chart.units)
    if chart.units is MEMORY:  # a memory page more or less must not fill the height of the chart
        middle, room = (low + high) / 2, LEAST_SPAN * abs(high) / 2
        low, high = min(low, middle - room), max(high, middle + room)
    lin = straight(low, high, unit=unit, from_zero=chart.from_zero)
    above = [value for value in values if value > 0]
    has_log = bool(above) and low >= 0 and high > 1.5 * min(above)
    return lin, logarithmic(min(above), high, unit=unit) if has_log else None


def labels_up(axis: Axis, key: str, *, is_shown: bool) -> Markup:
    spans = [tag("span", axis.label(tick), style=f"bottom:{100 * axis.place(tick):.2f}%") for tick in axis.ticks]
    return tag("div", *spans, class_="yt", data_y=key, hidden=not is_shown)


def labels_across(one: Horizontal, *, is_shown: bool) -> Markup:
    every = max(1, -(-len(one.axis.ticks) // 5))
    spans = []
    for number, tick in enumerate(one.axis.ticks):
        place = one.axis.place(tick)
        classes = edge_class(place, is_extra=bool(number % (2 * every)))
        spans.append(tag("span", one.axis.label(tick), style=f"left:{100 * place:.2f}%", class_=classes))
    return tag("div", *spans, tag("em", one.caption), class_="xt", data_x=one.key, hidden=not is_shown)


def edge_class(place: float, *, is_extra: bool) -> str | None:
    """Return the classes that keep a label inside at the ends, and hide every other label on a narrow screen."""
    names = [name for name, holds in (("lo", place < 0.02), ("hi", place > 0.98), ("extra", is_extra)) if holds]
    return " ".join(names) or None


def grid(axis: Axis, key: str, *, is_shown: bool) -> Markup:
    heights = [HEIGHT - round(HEIGHT * axis.place(tick)) for tick in axis.ticks]
    drawn = "".join(f"M0 {height}H{WIDTH}" for height in heights)
    return tag("path", class_="grid", data_y=key, d=drawn, style=None if is_shown else "display:none")


def spoken(chart: Chart) -> str:
    """Describe the chart for a screen reader."""
    described = []
    for line in chart.lines[:8]:
        values = [value for _, value in line.points if value is not None]
        first, last, least, most = map(plain, (values[0], values[-1], min(values), max(values)))
        described.append(f"{line.name} from {first} to {last}, least {least}, most {most}")
    more = f"; and {len(chart.lines) - 8} more" if len(chart.lines) > 8 else ""
    return f"{chart.title}{', ' + chart.caption if chart.caption else ''}: {'; '.join(described)}{more}. Arrow keys read it out."


def legend(lines: Sequence[Line]) -> Markup:
    items = []
    for line in lines:
        more = (" dashed" if is_dashed(line) else "") + (" dot" if line.shape == "dots" else "")
        key = tag("i", class_=f"key c{line.colour % COLOURS}{more}")
        items.append(tag("li", key, line.name, data_track=None if line.is_of_all else line.track))
    return tag("ul", *items, class_="legend")


def is_dashed(line: Line) -> bool:
    """Return whether a line is dashed: by itself, or because it repeats a colour after the first eight lines."""
    return line.is_dashed or (line.colour // COLOURS) % 2 == 1


def line_data(line: Line, kept: Sequence[Point]) -> dict[str, Any]:
    """Return what page.js needs of a line: the kept points, and means for smoothing if some points were dropped."""
    content: dict[str, Any] = {
        "t": line.track,
        "n": line.name,
        "k": line.shape,
        "c": line.colour % COLOURS,
        "x": [number_json(x) for x, _ in kept],
        "y": [number_json(y) for _, y in kept],
    }
    content |= {"keep": True} if line.is_of_all else {}
    if len(kept) < len(line.points):
        columns = means(line.points, MEANS)
        content |= {"mx": [number_json(x) for x, _ in columns], "my": [number_json(y) for _, y in columns]}
    return content


def has_means(chart: Chart, line: Line, kept: Sequence[Point]) -> bool:
    """Return whether the line is drawn as its mean over faint extremes: three noisy runs would hide each other."""
    return chart.is_smoothed and line.shape == "line" and len(kept) < len(line.points)


def line_chart(chart: Chart) -> Markup | None:
    """Draw a chart; None if there is nothing to draw."""
    lines = [line for line in chart.lines if any(value is not None for _, value in line.points)]
    if not lines:
        return None
    chart = replace(chart, lines=lines)
    lin, log = vertical_axes(lines, chart)
    shown, key = (log, "log") if chart.starts_log and log is not None else (lin, "lin")
    first = chart.across[0]
    kept = [thin(line.points) for line in lines]

    def place(x: float, y: float) -> tuple[int, int]:
        return round(WIDTH * first.axis.place(x)), HEIGHT - round(HEIGHT * shown.place(y))

    paths = []
    for line, points in zip(lines, kept, strict=True):
        look = f"l c{line.colour % COLOURS} {line.shape}{' dashed' if is_dashed(line) else ''}"
        middle = means(line.points, MEANS) if has_means(chart, line, points) else []
        drawn = path(points, place, line.shape, is_log=shown.is_log)
        paths.append(tag("path", class_=look + (" faint" if middle else ""), data_track=line.track, d=drawn))
        if line.shape == "line" and len(points) <= SPARSE:
            paths.append(
                tag("path", class_=f"{look} dots mean".replace(" dashed", ""), d=path(points, place, "dots", is_log=shown.is_log))
            )
        if middle:
            paths.append(tag("path", class_=f"{look} mean", d=path(middle, place, line.shape, is_log=shown.is_log)))
    scales: Mapping[str, Axis] = {"lin": lin} if log is None else {"lin": lin, "log": log}
    grids = [grid(axis, name, is_shown=name == key) for name, axis in scales.items()]
    island = {
        "id": chart.key,
        "lines": [line_data(line, points) for line, points in zip(lines, kept, strict=True)],
        "y": {name: [axis.low, axis.high] for name, axis in scales.items()},
        "x": {one.key: [one.axis.low, one.axis.high, one.axis.unit.factor, one.caption] for one in chart.across},
        "scale": key,
        "unit": [lin.unit.name, lin.unit.factor],
        "smooth": chart.is_smoothed,
    }
    caption = " ".join(piece for piece in (chart.caption, f"({lin.unit.name})" if lin.unit.name else "") if piece)
    named = legend(lines) if len(lines) > 1 or chart.is_named else None
    pressed = "true" if key == "log" else "false"
    button = tag("button", "log", type="button", class_="log", aria_pressed=pressed, title="log scale") if log else None
    labels = [labels_up(axis, name, is_shown=name == key) for name, axis in scales.items()]
    drawn = plot(drawing(*grids, *paths), spoken(chart), *vertical_marks(chart))
    body = tag("div", *labels, drawn, *(labels_across(one, is_shown=one is first) for one in chart.across), class_="body")
    notes = [tag("p", note, class_="note") for note in chart.notes]
    return frame(chart.key, chart.title, caption, named, button, body, *notes, data(island))


def vertical_marks(chart: Chart) -> list[Markup]:
    """Draw named vertical lines; a name goes a line lower if the one before is near, so that names do not overlap."""
    axis = chart.across[0].axis
    marks: list[Markup] = []
    turn, before = 0, -1.0
    for name, at in chart.marks:
        place = axis.place(at)
        turn = (turn + 1) % 4 if place - before < NEAR_MARKS else 0
        before = place
        label = tag("b", name, class_="left" if place > 0.8 else None, style=f"top:{1.1 * turn:.1f}rem")
        marks.append(tag("span", label, class_="mark", data_at=number_json(at), style=f"left:{100 * place:.2f}%"))
    return marks


def drawing(*shapes: Markup, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    """Put shapes into an SVG that stretches with its box. Screen readers read the label of the plot instead."""
    return tag("svg", *shapes, viewBox=f"0 0 {width} {height}", preserveAspectRatio="none", aria_hidden="true")


def plot(drawn: Markup, described: str, *beside: Markup, class_: str = "plot", style: str | None = None) -> Markup:
    """Make a drawing reachable by keyboard, with a description for screen readers."""
    return tag("div", drawn, *beside, class_=class_, tabindex=0, role="img", aria_label=described, style=style)


def frame(
    key: str, title: str, caption: str, legend: Markup | None, button: Markup | None, *body: Markup | None, class_: str = ""
) -> Markup:
    """Put a chart into its frame of title, caption, legend and button."""
    head = tag("div", tag("h3", title), tag("small", caption) if caption else None, button, class_="head")
    return tag("figure", tag("figcaption", head, legend), join(*body), class_=f"chart {class_}".strip(), id=f"chart-{key}")
