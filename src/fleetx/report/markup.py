"""Write HTML whose texts are escaped by construction (only what `tag` made is taken as markup), and tables of settings."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "–"
_MISSING = object()
VOID = frozenset({"meta", "input", "br", "path", "line", "rect", "image"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None
"""Markup, or text that will be escaped."""


def escaped(child: str) -> Markup:
    return child if isinstance(child, Markup) else Markup(html.escape(child))


def join(*children: Child) -> Markup:
    return Markup("".join(escaped(child) for child in children if child is not None))


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """Make an element. `class_` is class, `data_x` is data-x; None and False leave an attribute out, True has no value."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-") if key not in ("viewBox", "preserveAspectRatio") else key
        written.append(f" {key}" if value is True else f' {key}="{html.escape(str(value))}"')
    opened = f"<{name}{''.join(written)}>"
    if name in VOID and not children:
        return Markup(opened if name in ("meta", "input", "br") else opened[:-1] + "/>")
    return Markup(f"{opened}{join(*children)}</{name}>")


def data(value: Any) -> Markup:
    """Make a block of JSON for page.js. `<` is written as an escape, so that no text can end the block."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(f'<script type="application/json">{text}</script>')


def shown(value: object) -> str:
    if value is _MISSING or value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False) if value else "none"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def differing(columns: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the names of settings that differ, and of those that are the same in all columns, in their order."""
    names = dict.fromkeys(name for column in columns for name in column)
    differs = [name for name in names if len({shown(column.get(name, _MISSING)) for column in columns}) > 1]
    return differs, [name for name in names if name not in set(differs)]


def table(heads: Sequence[str], columns: Sequence[Mapping[str, Any]], names: Sequence[str], *, class_: str = "") -> Markup:
    top = tag("thead", tag("tr", tag("th", "", scope="col"), *(tag("th", head, scope="col") for head in heads)))
    rows = [
        tag("tr", tag("th", name, scope="row"), *(tag("td", shown(column.get(name, _MISSING))) for column in columns))
        for name in names
    ]
    whole = tag("table", top if len(heads) > 1 else None, tag("tbody", *rows), class_=f"settings {class_}".rstrip())
    return tag("div", whole, class_="scroll", tabindex=0)


def side_by_side(heads: Sequence[str], columns: Sequence[Mapping[str, Any]], what: str) -> Markup | None:
    """Show what differs first and fold away the rest; one column is a plain table. `what` is the plural, as "settings"."""
    differs, same = differing(columns)
    if not differs and not same:
        return None
    if len(columns) == 1:
        return table(heads, columns, [*differs, *same])
    first = table(heads, columns, differs, class_="diff") if differs else tag("p", f"The same {what} in all.", class_="note")
    if not same:
        return first
    count = f"{len(same)} {what} are the same" if len(same) > 1 else f"1 of the {what} is the same"
    return join(first, tag("details", tag("summary", count), table(heads[:1], columns[:1], same)))
