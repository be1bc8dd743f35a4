"""Read the lines of metrics.jsonl as Updates, and let a resumed run replace the updates that it did again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

METRICS = "metrics.jsonl"
LEAST, MOST, MOST_WHOLE = 1e-290, 1e290, 2**53
NAMED_LINES = 8
"""Damaged lines that are named; the others are counted."""


@dataclass(slots=True)
class RankTimes:
    """Seconds of one rank, summed over some updates."""

    seconds: float
    compute: float
    communication: float
    data: float


@dataclass(slots=True)
class Update:
    """One line of metrics.jsonl, on worker 0: bytes and seconds, None where nothing was logged."""

    start: int
    pair: int
    step: int
    seconds: float | None
    """Seconds since the start of its process."""
    loss: float | None
    lr: float | None
    skipped: bool
    loss_scale: float | None
    grad_norm: float | None
    bytes_sent: float | None
    bytes_dense: float | None
    period: float | None
    samples: float | None
    memory_bytes: float | None
    noise_scale: float | None
    density: float | None
    split: dict[str, float]
    values: dict[str, float | None]
    trust_ratios: dict[str, float] | None
    ranks: dict[int, RankTimes] | None
    total_seconds: float | None = None
    """Seconds since the first start, updates included that a resumed run did again; so are the other totals."""
    total_sent: float = 0.0
    total_dense: float = 0.0


NUMBERS = (
    *("seconds", "loss", "lr", "loss_scale", "grad_norm", "bytes_sent", "bytes_dense"),
    *("period", "samples", "memory_bytes", "noise_scale", "density"),
)
"""Fields of an Update that are a number or None."""


# --- one line ---------------------------------------------------------------------------------------------------------------


def number(value: object) -> float | None:
    """Return a number that a chart can use, or None: finite, and not so large that a scale would overflow."""
    if type(value) is float and LEAST < abs(value) < MOST:  # the usual case first: a run has a million of them
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        read = float(value)
    except OverflowError:
        return None
    return (read if abs(read) > LEAST else 0.0) if abs(read) < MOST else None


def whole(value: object) -> int | None:
    if type(value) is int:
        return value if abs(value) <= MOST_WHOLE else None
    read = number(value)
    return int(read) if read is not None and read == int(read) else None


def numbers(value: object) -> dict[str, float]:
    read = {name: number(each) for name, each in value.items()} if isinstance(value, dict) else {}
    return {str(name): each for name, each in read.items() if each is not None}


def rank_times(value: object) -> dict[int, RankTimes] | None:
    """Return the times of ranks for which all four are there; None if there is no such rank."""
    times_of = {}
    for rank, times in value.items() if isinstance(value, dict) else ():
        read = numbers(times)
        if str(rank).isdecimal() and {"seconds", "compute", "communication", "data"} <= read.keys():
            times_of[int(rank)] = RankTimes(read["seconds"], read["compute"], read["communication"], read["data"])
    return times_of or None


def update_from(line: Mapping[str, Any]) -> Update | None:
    """Make an Update of a line; None if it names no step."""
    step = whole(line.get("step"))
    if step is None:
        return None
    values = line.get("values")
    plain: dict[str, Any] = {name: number(line.get(name)) for name in NUMBERS}
    return Update(
        start=whole(line.get("start")) or 1,
        pair=whole(line.get("pair")) or 1,
        step=step,
        skipped=line.get("skipped") is True,
        split=numbers(line.get("split")),
        values={str(name): number(value) for name, value in values.items()} if isinstance(values, dict) else {},
        trust_ratios=numbers(line.get("trust_ratios")) or None,
        ranks=rank_times(line.get("ranks")),
        **plain,
    )


# --- all lines --------------------------------------------------------------------------------------------------------------


DECODER = json.JSONDecoder(parse_constant=lambda _: None)
"""Decodes NaN and Infinity, which are no JSON but may be written, as None."""


def parse_line(text: str) -> tuple[dict[str, Any] | None, bool]:
    """Return the object of a line, and whether it is all of the line: a start after a kill may go on in a line cut off."""
    for begin in (0, text.rfind('{"start"')):
        try:
            content = DECODER.decode(text[begin:] if begin else text) if begin >= 0 else None
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            return content, begin == 0
    return None, False


def parse_lines(text: str) -> tuple[list[Update], list[str]]:
    """Return all updates in the order of the file, and its problems. A line that a kill cut off counts as no damage: it is the
    last one, or the next belongs to another start."""
    updates: list[Update] = []
    bad: list[tuple[int, int]] = []  # places of lines, and updates before them
    lines = text.split("\n")
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        content, is_whole = parse_line(line)
        if content is None or not is_whole:
            bad.append((place, len(updates)))
        update = update_from(content) if content is not None else None
        if update is not None:
            updates.append(update)
        elif is_whole:
            bad.append((place, len(updates)))
    cut = [place for place, before in bad if is_cut(updates, before, is_last=place == len(lines))]
    damaged = [place for place, _ in bad if place not in cut]
    problems = [f"line {place} of {METRICS} cannot be read" for place in damaged[:NAMED_LINES]]
    if len(damaged) > NAMED_LINES:
        problems.append(f"{len(damaged) - NAMED_LINES} more lines of {METRICS} cannot be read")
    return updates, problems + [f"line {place} of {METRICS} was cut off, as by a kill" for place in cut]


def is_cut(updates: Sequence[Update], before: int, *, is_last: bool) -> bool:
    """Return whether a bad line, with `before` updates above it, was cut off by a kill."""
    if is_last or before == len(updates):
        return is_last
    return before > 0 and updates[before].start != updates[before - 1].start


def add_totals(updates: Sequence[Update]) -> None:
    """Fill in the totals of seconds and bytes since the first start, in the order of the file."""
    ended: dict[int, float] = {}  # last seconds of each start
    before: dict[int, float] = {}  # seconds of all starts before each start
    sent: dict[int, list[float]] = {}
    for update in updates:
        if update.start not in before:
            before[update.start] = sum(ended.values())
            ended[update.start] = 0.0
        if update.seconds is not None:
            ended[update.start] = max(ended[update.start], update.seconds)
            update.total_seconds = before[update.start] + update.seconds
        totals = sent.setdefault(update.pair, [0.0, 0.0])
        totals[0] += update.bytes_sent or 0.0
        totals[1] += update.bytes_dense or 0.0
        update.total_sent, update.total_dense = totals


def superseded(updates: Sequence[Update]) -> dict[int, list[Update]]:
    """Return the updates by pair; a start whose first line is step s replaces all earlier lines of that pair from s on."""
    kept: dict[int, list[Update]] = {}
    starts: dict[int, int] = {}
    for update in updates:
        own = kept.setdefault(update.pair, [])
        if starts.setdefault(update.pair, update.start) != update.start:
            own[:] = [earlier for earlier in own if earlier.step < update.step]
            starts[update.pair] = update.start
        own.append(update)
    for own in kept.values():
        own.sort(key=lambda update: update.step)  # in order already, unless the file is damaged
    return dict(sorted(kept.items()))
