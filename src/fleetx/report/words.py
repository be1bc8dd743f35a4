"""Numbers as text: counts, seconds, bytes, and the unit of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    name: str
    factor: float
    """What one of it is, in the unit that the numbers are kept in."""


BYTES = (Unit("bytes", 1.0), Unit("kB", 1e3), Unit("MB", 1e6), Unit("GB", 1e9), Unit("TB", 1e12))
"""Of bytes on the wire: the rates of links are decimal."""
MEMORY = (Unit("B", 1.0), Unit("KiB", 2.0**10), Unit("MiB", 2.0**20), Unit("GiB", 2.0**30), Unit("TiB", 2.0**40))
LONG_TIMES = (Unit("s", 1.0), Unit("min", 60.0), Unit("h", 3600.0), Unit("days", 86400.0))
SHORT_TIMES = (Unit("µs", 1e-6), Unit("ms", 1e-3), Unit("s", 1.0))
PLAIN = Unit("", 1.0)


def unit_for(largest: float, units: Sequence[Unit]) -> Unit:
    """The largest of them (in rising order) in which the largest number is at least 1.5, so that an axis has whole ticks."""
    fitting = [unit for unit in units if abs(largest) >= 1.5 * unit.factor]
    return fitting[-1] if fitting else units[0]


def plain(value: float, digits: int = 4) -> str:
    """With so many digits that count; thousands apart: 0.01234, 12,345, 1.2e-07."""
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size >= 12:
        return f"{value:.{digits - 1}g}"
    if size >= digits - 1:
        return f"{value:,.0f}"
    text = f"{value:,.{digits - 1 - size}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def in_units(value: float, units: Sequence[Unit]) -> str:
    unit = unit_for(value * 1.5, units)
    digits = 3 if abs(value) >= unit.factor else 2
    return f"{plain(value / unit.factor, digits)} {unit.name}"


def size(count: float) -> str:
    """Bytes on the wire, in decimal units: 1500000 is "1.5 MB"."""
    return in_units(count, BYTES)


def memory(count: float) -> str:
    """Bytes of memory, in binary units: 1572864 is "1.5 MiB"."""
    return in_units(count, MEMORY)


def short_time(seconds: float) -> str:
    return in_units(seconds, SHORT_TIMES)


def duration(seconds: float) -> str:
    """As said aloud: 61 s is "1 min 1 s"."""
    if seconds < 60:
        return f"{plain(seconds, 3)} s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s"


def share(part: float, of: float) -> str:
    """12.3 % and 0.04 %: small shares keep two digits."""
    return f"{plain(100 * part / of, 3 if part >= 0.01 * of else 2)} %"
