"""One thing that was looked at, how it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

# --- Times of all-reduces by size, and the rate of a link that follows from one -----------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Row:
    size_bytes: int
    seconds: float
    """Of one all-reduce: the median, on the slowest rank."""
    bus_bytes_per_second: float
    """Of a rank's link, in each direction, as if the ranks were a ring."""
    is_sum_right: bool


@final
@dataclass(frozen=True, slots=True)
class Table:
    backend: str
    ranks: int
    rows: tuple[Row, ...]


def bus_rate(size_bytes: float, seconds: float, ranks: int) -> float:
    """A ring sends 2 (N-1)/N of the bytes over each link."""
    return 2 * (ranks - 1) / ranks * size_bytes / seconds if seconds > 0 else 0.0


def from_json(values: Sequence[dict[str, Any]]) -> tuple[Table, ...]:
    return tuple(Table(one["backend"], one["ranks"], tuple(Row(**row) for row in one["rows"])) for one in values)


# ----------------------------------------------------------------------------------------------------------------------

Level = Literal["ok", "note", "problem"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    level: Level
    what: str
    fix: str = ""
    """A command or a sentence; every problem has one."""


def ok(topic: str, what: str) -> Finding:
    return Finding(topic, "ok", what)


def note(topic: str, what: str, fix: str = "") -> Finding:
    return Finding(topic, "note", what, fix)


def problem(topic: str, what: str, fix: str) -> Finding:
    return Finding(topic, "problem", what, fix)


def count(findings: Iterable[Finding], level: Level) -> int:
    return sum(finding.level == level for finding in findings)
