"""HTML whose texts are escaped by construction: only what `tag` has made is taken as markup."""

from __future__ import annotations

import html
import json
from typing import Any

VOID = frozenset({"meta", "input", "br", "path", "line", "rect", "image"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None
"""Markup, or a text that will be escaped."""


def escaped(child: str) -> Markup:
    return child if isinstance(child, Markup) else Markup(html.escape(child))


def join(*children: Child) -> Markup:
    return Markup("".join(escaped(child) for child in children if child is not None))


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """`class_`, `for_` are class and for; `data_x` is data-x. None and False leave an attribute out, True has no value."""
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
    """A block of JSON for the page's script. `<` is written as an escape: a text cannot end the block."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(f'<script type="application/json">{text}</script>')
