"""Draw bars as SVG inside a page: text in the page's own colour, so that it is read on white and on black, and on a phone.

docs/stylesheets/extra.css colours the bars. A Markdown viewer that drops SVG still shows the table below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetx.report.markup import Markup, join, tag

WIDTH, ROW, BAR, TOP = 400, 34, 9, 22
"""Units of the picture. It is no wider than a phone, where one unit is then about one pixel."""


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    """At least 0."""
    shown: str
    """The value with its unit."""
    is_ours: bool = True


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Return one figure on one line, as Markdown wants HTML. The longest bar fills the width."""
    longest = max(bar.value for bar in bars) or 1.0
    rows = [_row(bar, TOP + ROW * index, bar.value / longest) for index, bar in enumerate(bars)]
    told = "; ".join(f"{bar.label}: {bar.shown}" for bar in bars)
    head = tag("text", title, x=0, y=13, class_="title")
    box = f"0 0 {WIDTH} {TOP + ROW * len(bars)}"
    picture = tag("svg", head, *rows, viewBox=box, role="img", aria_label=f"{title}. {told}", class_="bars")
    return str(tag("figure", picture, class_="bars"))


def _row(bar: Bar, y: int, share: float) -> Markup:
    return join(
        tag("text", bar.label, x=0, y=y + 15),
        tag("text", bar.shown, x=WIDTH, y=y + 15, text_anchor="end"),
        tag("rect", x=0, y=y + 20, width=WIDTH, height=BAR, rx=2, class_="track"),
        tag("rect", x=0, y=y + 20, width=f"{share * WIDTH:.1f}", height=BAR, rx=2, class_="ours" if bar.is_ours else "other"),
    )


def folded(summary: str, text: str) -> str:
    """Return a part of a page that is opened by a click."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'
