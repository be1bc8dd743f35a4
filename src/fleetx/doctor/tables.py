"""Times of all-reduces by size, and the rate of a link that follows from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final


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
