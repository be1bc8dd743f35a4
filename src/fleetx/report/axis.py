"""Format numbers as text, choose the unit of an axis, place values and ticks on it: straight, or by powers of ten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A unit that numbers are shown in."""

    name: str
    factor: float
    """Size of the unit, in the unit that the numbers are stored in."""


BYTES = (Unit("bytes", 1.0), Unit("kB", 1e3), Unit("MB", 1e6), Unit("GB", 1e9), Unit("TB", 1e12))
"""Bytes on the wire: the rates of links are decimal."""
MEMORY = (Unit("B", 1.0), Unit("KiB", 2.0**10), Unit("MiB", 2.0**20), Unit("GiB", 2.0**30), Unit("TiB", 2.0**40))
LONG_TIMES = (Unit("s", 1.0), Unit("min", 60.0), Unit("h", 3600.0), Unit("days", 86400.0))
SHORT_TIMES = (Unit("µs", 1e-6), Unit("ms", 1e-3), Unit("s", 1.0))
PLAIN = Unit("", 1.0)


def unit_for(largest: float, units: Sequence[Unit]) -> Unit:
    """Return the largest unit (they are in rising order) in which `largest` is at least 1.5: an axis then has whole ticks."""
    fitting = [unit for unit in units if abs(largest) >= 1.5 * unit.factor]
    return fitting[-1] if fitting else units[0]


def plain(value: float, digits: int = 4) -> str:
    """Format with so many significant digits and commas between thousands: 0.01234, 12,345, 1.2e-07."""
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
    """Format bytes on the wire in decimal units: 1500000 is "1.5 MB"."""
    return in_units(count, BYTES)


def memory_size(count: float) -> str:
    """Format bytes of memory in binary units: 1572864 is "1.5 MiB"."""
    return in_units(count, MEMORY)


def short_time(seconds: float) -> str:
    return in_units(seconds, SHORT_TIMES)


def duration(seconds: float) -> str:
    """Format seconds in the two largest units: 61 s is "1 min 1 s"."""
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
    """Format a share as 12.3 % or 0.04 %: small ones keep two digits."""
    return f"{plain(100 * part / of, 3 if part >= 0.01 * of else 2)} %"


@dataclass(frozen=True)
class Axis:
    """A range of values with its ticks, straight or logarithmic."""

    low: float
    high: float
    ticks: Sequence[float]
    unit: Unit = PLAIN
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the place of a value: 0 at the low end, 1 at the high one, clamped."""
        if self.is_log:
            place = (math.log(max(value, self.low)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, place))

    def label(self, tick: float) -> str:
        return plain(tick / self.unit.factor, 5)


def nice_step(span: float, count: int) -> float:
    """Return 1, 2 or 5 times a power of ten, so that about `count` steps fit into the span."""
    rough = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    return next((digit * power for digit in (1.0, 2.0, 5.0) if digit * power >= 0.85 * rough), 10.0 * power)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    step = nice_step(high - low, count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12 - math.floor(math.log10(step))) for place in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Return powers of ten: thinned if there are many, with twos and fives between them if there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high < 150 * low else (1,)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    inside = inside if len(digits) > 1 else inside[:: max(1, math.ceil(len(inside) / (count + 1)))]
    return inside if len(inside) > 1 else nice_ticks(low, high, count)


def straight(low: float, high: float, *, unit: Unit = PLAIN, count: int = 5, from_zero: bool = False) -> Axis:
    """Make an axis with a little room at its ends; it starts at zero if the values come near it."""
    low, high = min(low, high), max(low, high)
    if from_zero or (0 <= low <= 0.4 * high):
        low = min(0.0, low)
    if high <= low:
        room = abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    room = 0.05 * (high - low)
    low, high = low - (room if low != 0 else 0.0), high + (room if high != 0 else 0.0)
    return Axis(low, high, _in_unit(nice_ticks(low / unit.factor, high / unit.factor, count), unit), unit)


def exact(low: float, high: float, *, unit: Unit = PLAIN, count: int = 6, whole: bool = False) -> Axis:
    """Make an axis that ends where the values do, as the axis of steps."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    ticks = nice_ticks(low / unit.factor, high / unit.factor, count)
    return Axis(low, high, _in_unit([tick for tick in ticks if not whole or tick == int(tick)], unit), unit)


def logarithmic(low: float, high: float, *, unit: Unit = PLAIN, count: int = 6) -> Axis:
    """Make a logarithmic axis of values above zero."""
    low, high = (low / 1.5, high * 1.5) if high <= low * 1.001 else (low / (high / low) ** 0.04, high * (high / low) ** 0.04)
    return Axis(low, high, _in_unit(log_ticks(low / unit.factor, high / unit.factor, count), unit), unit, is_log=True)


def _in_unit(ticks: Sequence[float], unit: Unit) -> list[float]:
    return [tick * unit.factor for tick in ticks]
