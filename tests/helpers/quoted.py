"""Is a text that a page quotes one of the library's own? Its messages are read from the source, with holes for values."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

SOURCE = Path(__file__).parents[2] / "src" / "fleetx"
HOLE = None
CUT = "…"
"""At the end of a quotation: the message goes on. Elsewhere it stands for a value."""
LEAST_LETTERS = 12
"""Of a message's own, that a quotation must have in common with it: "… is …" would be said of everything."""
Template: TypeAlias = tuple[str | None, ...]


def plain(text: str) -> str:
    """Without the line breaks of a page."""
    return re.sub(r"\s+", " ", text).strip()


@functools.cache
def templates() -> tuple[Template, ...]:
    """Every text in the source but docstrings."""
    return tuple(dict.fromkeys(found for file in sorted(SOURCE.rglob("*.py")) for found in _in_file(file.read_text("utf-8"))))


def _in_file(source: str) -> Iterator[Template]:
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in docstrings:
            parts = _joined(_parts(node))
            if sum(len(part) for part in parts if part) >= LEAST_LETTERS:
                yield parts


def _parts(node: ast.expr) -> list[str | None]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in _parts(value)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _parts(node.left) + _parts(node.right)
    return [HOLE]


def _joined(parts: list[str | None]) -> Template:
    """Texts that stand beside each other as one, and holes likewise."""
    found: list[str | None] = []
    for part in parts:
        if part is not HOLE and found and found[-1] is not HOLE:
            found[-1] += re.sub(r"\s+", " ", part)
        elif part is not HOLE or not found or found[-1] is not HOLE:
            found.append(part and re.sub(r"\s+", " ", part))
    return tuple(found)


def is_said(quotation: str) -> bool:
    """Whether some message of the source can read so, whole or up to where the quotation is cut."""
    text = plain(quotation)
    is_cut = text.endswith(CUT)
    text = text.removesuffix(CUT).rstrip() if is_cut else text
    return any(_common(template, text, is_cut=is_cut) >= min(LEAST_LETTERS, len(text)) for template in templates())


def _common(template: Template, text: str, *, is_cut: bool) -> int:
    """Letters of the template's own in the text; -1 where it cannot read so."""

    @functools.cache
    def best(part: int, at: int) -> int:
        if part == len(template):
            return 0 if at == len(text) else -1
        own = template[part]
        if is_cut and at == len(text):
            return 0
        if own is HOLE:
            rests = (best(part + 1, later) for later in range(at, len(text) + 1))
            return max(rests)
        if text.startswith(own, at):
            rest = best(part + 1, at + len(own))
            return -1 if rest < 0 else rest + len(own)
        is_prefix = is_cut and own.startswith(text[at:])
        return len(text) - at if is_prefix else -1

    longest = max((part for part in template if part), key=len)
    if not is_cut and longest not in text:
        return -1  # as most are: found out quickly
    return best(0, 0)


def reads_as(quotation: str, message: str) -> bool:
    """Whether a message that was really raised is the one quoted."""
    words = plain(quotation)
    pattern = ".*".join(map(re.escape, words.removesuffix(CUT).rstrip().split(CUT) if words.endswith(CUT) else words.split(CUT)))
    return re.fullmatch(pattern + (".*" if words.endswith(CUT) else ""), plain(message)) is not None
