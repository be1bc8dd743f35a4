"""Draw parts of a whole: areas over the steps, and one bar for each run or rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .axis import SHORT_TIMES, Axis, share, short_time, straight, unit_for
from .line_chart import HEIGHT, WIDTH, Horizontal, drawing, frame, grid, labels_across, labels_up, number_json, plot
from .markup import Markup, data, tag

TINTS = {"data": 0, "forward": 1, "backward": 2, "compute": 2, "communication": 3, "update": 4, "other": 5, "rest": 5}
TINT_COUNT = 6
LEAST_SHARE = 0.002


@dataclass(frozen=True)
class Bar:
    """One bar of a bar chart."""

    label: str
    parts: Mapping[str, float]
    """Seconds by name."""


def tint(part: str) -> str:
    """Return the colour class of a part, the same in every chart; unknown parts share the last."""
    return f"q{TINTS.get(part, TINT_COUNT - 1)}"


def legend(parts: Sequence[str], amounts: Mapping[str, str] | None = None) -> Markup:
    items = [
        tag("li", tag("i", class_=f"key box {tint(part)}"), f"{part} {(amounts or {}).get(part, '')}".rstrip()) for part in parts
    ]
    return tag("ul", *items, class_="legend")


def parts_of(wholes: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the parts that take more than LEAST_SHARE of some whole, in their order."""
    names = dict.fromkeys(name for parts in wholes for name in parts)
    return [name for name in names if any(parts.get(name, 0.0) > LEAST_SHARE * sum(parts.values()) for parts in wholes)]


def stacked_path(places: Sequence[float], low: Sequence[float], high: Sequence[float], across: Axis, up: Axis) -> str:
    """Return the `d` of an area: along its upper edge, and back along the lower."""
    there = [(x, y) for x, y in zip(places, high, strict=True)]
    back = [(x, y) for x, y in zip(places, low, strict=True)][::-1]
    corners = [f"{round(WIDTH * across.place(x))} {HEIGHT - round(HEIGHT * up.place(y))}" for x, y in there + back]
    return f"M{'L'.join(corners)}Z"


def area_chart(
    key: str, title: str, means: Sequence[tuple[float, Mapping[str, float]]], across: Horizontal, *, track: int
) -> Markup | None:
    """Draw the mean seconds of an update's parts over the steps; None for fewer than two points."""
    parts = parts_of([parts for _, parts in means])
    if len(means) < 2 or not parts:
        return None
    places = [place for place, _ in means]
    most = max(sum(one.values()) for _, one in means)
    up = straight(0.0, most, unit=unit_for(most, SHORT_TIMES), from_zero=True)
    below = [0.0] * len(means)
    areas = []
    for part in parts:
        above = [low + one.get(part, 0.0) for low, (_, one) in zip(below, means, strict=True)]
        areas.append(tag("path", class_=f"area {tint(part)}", d=stacked_path(places, below, above, across.axis, up)))
        below = above
    spoken = f"{title}: mean time of an update over the steps, by {', '.join(parts)}. Arrow keys read it out."
    steps = [number_json(place) for place in places]
    lines = [
        {"t": track, "n": part, "k": "area", "q": TINTS.get(part, TINT_COUNT - 1), "x": steps,
         "y": [number_json(one.get(part, 0.0)) for _, one in means]}
        for part in parts
    ]  # fmt: skip
    island = {
        "id": key,
        "lines": lines,
        "y": {"lin": [up.low, up.high]},
        "x": {across.key: [across.axis.low, across.axis.high, 1, across.caption]},
        "scale": "lin",
        "unit": [up.unit.name, up.unit.factor],
        "fixed": True,
    }
    drawn = plot(drawing(grid(up, "lin", is_shown=True), *areas), spoken)
    body = tag("div", labels_up(up, "lin", is_shown=True), drawn, labels_across(across, is_shown=True), class_="body")
    return frame(key, title, f"mean of an update ({up.unit.name})", legend(parts), None, body, data(island))


def bar_chart(key: str, title: str, caption: str, bars: Sequence[Bar], note: str | None = None) -> Markup | None:
    parts = parts_of([bar.parts for bar in bars])
    most = max((sum(bar.parts.values()) for bar in bars), default=0.0)
    if not parts or most <= 0:
        return None
    rows = [row for bar in bars for row in bar_row(bar, parts, most)]
    body = tag("div", *rows, class_="bars")
    amounts = {part: f"{short_time(bars[0].parts.get(part, 0.0))}, {share(bars[0].parts.get(part, 0.0), most)}" for part in parts}
    finding = tag("p", note, class_="finding") if note else None
    return frame(key, title, caption, legend(parts, amounts if len(bars) == 1 else None), None, body, finding, class_="wide")


def bar_row(bar: Bar, parts: Sequence[str], most: float) -> list[Markup]:
    whole = sum(bar.parts.values())
    words = [f"{part} {short_time(bar.parts[part])} ({share(bar.parts[part], whole)})" for part in parts if bar.parts.get(part)]
    rects, x = [], 0.0
    for part in parts:
        width = WIDTH * bar.parts.get(part, 0.0) / most
        hint = tag("title", f"{bar.label}: {part} {short_time(bar.parts.get(part, 0.0))}")
        rects.append(tag("rect", hint, class_=f"area {tint(part)}", x=f"{x:.1f}", y=0, width=f"{width:.1f}", height=10))
        x += width
    label, box = f"{bar.label}: {', '.join(words)}", f"0 0 {WIDTH} 10"
    svg = tag("svg", *rects, viewBox=box, preserveAspectRatio="none", role="img", tabindex=0, aria_label=label)
    return [tag("span", bar.label, class_="bar-label"), svg, tag("span", short_time(whole), class_="bar-total")]
