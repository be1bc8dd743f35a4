"""Select what the console shows of the ranks: one in full, of the others warnings and tracebacks. Pure: bytes in, bytes out.

Bare      rank 0 alone, byte for byte, so that its progress bar moves
Prefixed  any other rank, line by line: "n0·r1| text", with control characters escaped and lines selected by `keep`
Excerpt   the `keep` that selects warnings, errors and whole tracebacks
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from .topology import Plan

LINE_BYTES = 8 << 10
CUT = " [... cut]"

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_LINE_END = re.compile(rb"\r*\n|\r+(?=[^\r\n])")  # a \r at the very end may be half of \r\n
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_WARNING = re.compile(r"\w*Warning:|\bWARNING\b")
_ALARM = re.compile(
    r"\b(ERROR|CRITICAL|FATAL)\b|\bfatal:|^Fatal Python error|\bterminate called|\[[EF]\d{4} |^Exception (in thread|ignored in)"
)
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def escape(line: str) -> str:
    r"""Escape control characters as \x1b and the like: a line can then neither move the cursor nor look like several lines."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), line)


class _State(Enum):
    QUIET = auto()
    WARNED = auto()
    """After a warning; one indented line may follow: its source line."""
    FRAMES = auto()
    """Inside a traceback, before the line that names the exception."""
    GROUP = auto()
    """Inside an exception group."""
    NAMED = auto()
    """After an exception's name: the rest of its message follows, or a blank line and the next exception of a chain."""
    CHAINED = auto()
    """After the sentence that joins two tracebacks."""


class Excerpt:
    """Selects lines to show: call it with every line in order; it returns the lines to print."""

    def __init__(self) -> None:
        self._state = _State.QUIET
        self._held: list[str] = []  # a blank line, shown only if an exception chain continues after it

    def __call__(self, line: str) -> list[str]:
        plain = _TORCH_PREFIX.sub("", _COLOUR.sub("", line)).rstrip()
        if self._state in (_State.NAMED, _State.GROUP, _State.CHAINED) and not (plain or self._held):
            self._held = [line]
            return []
        held, self._held = self._held, []
        was, self._state = self._state, self._next(plain, after_blank=bool(held))
        is_source = was is _State.WARNED and _is_indented(plain)
        if self._state is _State.QUIET and not is_source:
            return []
        return [*held, line] if _State.CHAINED in (was, self._state) else [line]

    def _next(self, plain: str, *, after_blank: bool) -> _State:
        if plain.lstrip(" |+").startswith("Exception Group " + _TRACEBACK):
            return _State.GROUP
        if self._state is _State.GROUP and plain.lstrip().startswith(("|", "+")):
            return _State.GROUP
        if plain.endswith(_TRACEBACK):
            return _State.FRAMES
        if self._state is _State.FRAMES:
            return _State.FRAMES if _is_indented(plain) or not plain else _State.NAMED
        if self._state in (_State.NAMED, _State.GROUP) and plain in _CHAIN:
            return _State.CHAINED
        if self._state is _State.NAMED and _is_indented(plain) and not after_blank:
            return _State.NAMED
        if _WARNING.search(plain) or _ALARM.search(plain):
            return _State.WARNED
        return _State.QUIET


def _is_indented(line: str) -> bool:
    return line[:1] in (" ", "\t") and not line.isspace()


class View(Protocol):
    """Formats one rank's log for the console."""

    def feed(self, data: bytes) -> bytes: ...

    def end(self) -> bytes:
        """Return what is left at the end of the log."""


class Bare:
    def feed(self, data: bytes) -> bytes:
        return data

    def end(self) -> bytes:
        return b""


class Prefixed:
    def __init__(self, prefix: str, keep: Callable[[str], list[str]] = lambda line: [line]) -> None:
        self._prefix = prefix
        self._keep = keep
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        *lines, rest = _LINE_END.split(self._rest + data if self._rest else data.lstrip(b"\r"))
        self._rest = rest[: LINE_BYTES + 1]  # keep no more of an endless line than is shown
        return b"".join(self._show(line) for line in lines)

    def end(self) -> bytes:
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return self._show(rest) if rest else b""

    def _show(self, line: bytes) -> bytes:
        text = line[:LINE_BYTES].decode("utf-8", errors="replace") + (CUT if len(line) > LINE_BYTES else "")
        return "".join(f"{self._prefix}{escape(shown)}\n" for shown in self._keep(text)).encode("utf-8", errors="replace")


def shows_rank_0_bare(plan: Plan) -> bool:
    is_alone = plan.nodes.count == 1 and plan.process_count == 1
    return plan.tee == frozenset({0}) or (plan.tee == "all" and is_alone)


def make_view(rank: int, node: int, plan: Plan) -> View:
    if rank == 0 and shows_rank_0_bare(plan):
        return Bare()
    prefix = f"n{node}·r{rank}| "
    is_whole = plan.tee == "all" or rank in plan.tee
    return Prefixed(prefix) if is_whole else Prefixed(prefix, Excerpt())
