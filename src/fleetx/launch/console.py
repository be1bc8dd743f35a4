"""Select what the console shows of the ranks: one in full, of the others warnings and tracebacks. Pure: bytes in, bytes out.

Bare      rank 0 alone, byte for byte, so that its progress bar moves
Prefixed  any other rank, line by line: "n0·r1| text", with control characters escaped
Excerpts  any other rank: warnings, errors and whole tracebacks; a traceback that another rank has shown is not shown again
"""

from __future__ import annotations

import re
import time
from enum import Enum, auto
from typing import Protocol

from .topology import Plan

LINE_BYTES = 8 << 10
HOLD_SECONDS = 2.0
"""Time for which a traceback at the end of a log is held back: other ranks may raise the same error, or the run may end."""
CUT = " [... cut]"

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_LINE_END = re.compile(rb"\r*\n|\r+(?=[^\r\n])")  # a \r at the very end may be half of \r\n
_ADDRESS = re.compile(r"0x[0-9a-f]+")
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
    """The last line was a warning; one indented line may follow: its source line."""
    FRAMES = auto()
    """Inside a traceback, before the line that names the exception."""
    GROUP = auto()
    """Inside an exception group."""
    NAMED = auto()
    """The last line began with an exception's name: the rest of its message follows, or a blank line and the next exception of a
    chain."""
    CHAINED = auto()
    """The last line was the sentence that joins two tracebacks."""


class Excerpt:
    """Selects lines to show: call it with every line in order; it returns the lines to print."""

    def __init__(self) -> None:
        self._state = _State.QUIET
        self._held: list[str] = []  # a blank line, shown only if an exception chain continues after it

    @property
    def is_in_traceback(self) -> bool:
        """Whether the last line was part of a traceback, which may go on."""
        return self._state in (_State.FRAMES, _State.GROUP, _State.NAMED, _State.CHAINED)

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


class Tracebacks:
    """The tracebacks that the console has shown, of all ranks of this node."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def is_new(self, lines: list[str]) -> bool:
        """Return whether no rank has shown this traceback yet, and remember it."""
        plain = "\n".join(_ADDRESS.sub("0x", _TORCH_PREFIX.sub("", _COLOUR.sub("", line))).rstrip() for line in lines)
        is_new = plain not in self._shown
        self._shown.add(plain)
        return is_new


class View(Protocol):
    """Formats one rank's log for the console."""

    def feed(self, data: bytes) -> bytes: ...

    def wait(self) -> bytes:
        """Return what was held back for long enough; called while nothing is written."""

    def end(self) -> bytes:
        """Return what is left at the end of the log."""


class Lines:
    """Splits a log into lines of readable length, wherever its pieces were cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, rest = _LINE_END.split(self._rest + data if self._rest else data.lstrip(b"\r"))
        self._rest = rest[: LINE_BYTES + 1]  # keep no more of an endless line than is shown
        return [_text(line) for line in lines]

    def end(self) -> list[str]:
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line[:LINE_BYTES].decode("utf-8", errors="replace") + (CUT if len(line) > LINE_BYTES else "")


class Prefixed:
    def __init__(self, prefix: str) -> None:
        self._prefix, self._lines = prefix, Lines()

    def feed(self, data: bytes) -> bytes:
        return self._show(self._lines.feed(data))

    def wait(self) -> bytes:
        return b""

    def end(self) -> bytes:
        return self._show(self._lines.end())

    def _show(self, lines: list[str]) -> bytes:
        return "".join(f"{self._prefix}{escape(line)}\n" for line in lines).encode("utf-8", errors="replace")


class Excerpts(Prefixed):
    def __init__(self, prefix: str, tracebacks: Tracebacks) -> None:
        super().__init__(prefix)
        self._keep, self._tracebacks = Excerpt(), tracebacks
        self._held: list[str] = []
        self._held_since = 0.0

    def wait(self) -> bytes:
        is_due = bool(self._held) and time.monotonic() > self._held_since + HOLD_SECONDS
        return super()._show(self._release()) if is_due else b""

    def end(self) -> bytes:
        return super().end() + super()._show(self._release())

    def _show(self, lines: list[str]) -> bytes:
        shown: list[str] = []
        for line in lines:
            kept = self._keep(line)
            if self._keep.is_in_traceback:
                self._held_since = self._held_since if self._held else time.monotonic()
                self._held += kept
            else:
                shown += [*self._release(), *kept]
        return super()._show(shown)

    def _release(self) -> list[str]:
        held, self._held = self._held, []
        return held if held and self._tracebacks.is_new(held) else []


class Bare:
    """Shows everything, and remembers the tracebacks in it."""

    def __init__(self, tracebacks: Tracebacks | None = None) -> None:
        self._seen = Excerpts("", tracebacks or Tracebacks())

    def feed(self, data: bytes) -> bytes:
        self._seen.feed(data)
        return data

    def wait(self) -> bytes:
        self._seen.wait()
        return b""

    def end(self) -> bytes:
        self._seen.end()
        return b""


def shows_rank_0_bare(plan: Plan) -> bool:
    is_alone = plan.nodes.count == 1 and plan.process_count == 1
    return plan.tee == frozenset({0}) or (plan.tee == "all" and is_alone)


def make_view(rank: int, node: int, plan: Plan, tracebacks: Tracebacks | None = None) -> View:
    """Make the view of a rank. `tracebacks`: those that the views of this node's ranks share."""
    shared = tracebacks or Tracebacks()
    if rank == 0 and shows_rank_0_bare(plan):
        return Bare(shared)
    prefix = f"n{node}·r{rank}| "
    is_whole = plan.tee == "all" or rank in plan.tee
    return Prefixed(prefix) if is_whole else Excerpts(prefix, shared)
