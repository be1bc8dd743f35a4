"""Results: findings with their fixes, and tables of measured all-reduces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

# --- measured all-reduces -----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Row:
    size_bytes: int
    seconds: float
    """Median time of one all-reduce, on the slowest rank."""
    bus_bytes_per_second: float
    """Rate of a rank's link in each direction, as if the ranks formed a ring."""
    is_sum_right: bool


@final
@dataclass(frozen=True, slots=True)
class Table:
    backend: str
    ranks: int
    rows: tuple[Row, ...]


def bus_rate(size_bytes: float, seconds: float, ranks: int) -> float:
    """Return the rate of each link in a ring, which carries 2 (N-1)/N of the bytes."""
    return 2 * (ranks - 1) / ranks * size_bytes / seconds if seconds > 0 else 0.0


def from_json(values: Sequence[dict[str, Any]]) -> tuple[Table, ...]:
    return tuple(Table(one["backend"], one["ranks"], tuple(Row(**row) for row in one["rows"])) for one in values)


# --- findings -----------------------------------------------------------------------------------------------------------

Level = Literal["ok", "note", "problem"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    topic: str
    level: Level
    what: str
    fix: str = ""
    """Command or sentence that says what to do; every problem has one."""


def ok(topic: str, what: str) -> Finding:
    return Finding(topic, "ok", what)


def note(topic: str, what: str, fix: str = "") -> Finding:
    return Finding(topic, "note", what, fix)


def problem(topic: str, what: str, fix: str) -> Finding:
    return Finding(topic, "problem", what, fix)


def count(findings: Iterable[Finding], level: Level) -> int:
    return sum(finding.level == level for finding in findings)
