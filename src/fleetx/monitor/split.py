"""Split the time of an update by phase, from one log call to the next.

On a CPU by the host's clock. On a GPU the host runs ahead, so each change of phase records an event in the stream, and times are
taken between events on the device: a phase in which the device is idle counts with its idle time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol, final

import torch

from ..dist.heartbeat import Phase
from .async_values import AsyncValue, ReadyValue, event_now

NAMES = {
    Phase.SCRIPT: "data",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.WAIT: "communication",
    Phase.UPDATE: "update",
    Phase.SAVE: "other",
    Phase.EVALUATE: "other",
}
PARTS = ("data", "forward", "backward", "communication", "update", "other")
MOST_EVENTS = 4096
"""Maximum number of events kept between two log calls; beyond it the older half is summed up."""
COMPUTE = ("forward", "backward", "update")

Split = dict[str, float]


def zero_split() -> Split:
    return dict.fromkeys(PARTS, 0.0)


def sum_of(one: Mapping[str, float], other: Mapping[str, float]) -> Split:
    return {part: one[part] + other[part] for part in PARTS}


def compute_of(split: Mapping[str, float]) -> float:
    return sum(split[part] for part in COMPUTE)


class Stopwatch(Protocol):
    def changed(self, phase: Phase) -> None: ...

    def take(self) -> AsyncValue:
        """Return the split since the last call."""


@final
class HostStopwatch:
    def __init__(self, phase: Phase) -> None:
        self._phase, self._since = phase, time.perf_counter()
        self._split = zero_split()

    def changed(self, phase: Phase) -> None:
        now = time.perf_counter()
        self._split[NAMES[self._phase]] += now - self._since
        self._phase, self._since = phase, now

    def take(self) -> AsyncValue:
        self.changed(self._phase)
        taken, self._split = self._split, zero_split()
        return ReadyValue(taken)


@final
class _Marks:
    """Events of one update, read when all have completed: they may be in several streams."""

    def __init__(self, marks: list[tuple[Phase, torch.Event]], end: torch.Event, before: Split) -> None:
        self._marks, self._end, self._before = marks, end, before
        self._split: Split | None = None

    @property
    def is_ready(self) -> bool:
        return self._split is not None or (bool(self._end.query()) and all(event.query() for _, event in self._marks))

    def value(self) -> Split:
        if self._split is None:
            self._split = self._read()
        return self._split

    def _read(self) -> Split:
        split, ends = dict(self._before), [event for _, event in self._marks[1:]] + [self._end]
        for event in (self._marks[0][1], *ends):
            event.synchronize()
        for (phase, began), ended in zip(self._marks, ends, strict=True):
            split[NAMES[phase]] += began.elapsed_time(ended) / 1e3
        return split


@final
class DeviceStopwatch:
    def __init__(self, phase: Phase, device: torch.device) -> None:
        self._device = device
        self._marks = [(phase, event_now(self._device, enable_timing=True))]
        self._before = zero_split()

    def changed(self, phase: Phase) -> None:
        self._marks.append((phase, event_now(self._device, enable_timing=True)))
        if len(self._marks) >= MOST_EVENTS:
            self._add_up()

    def _add_up(self) -> None:
        """Sum up the older half of the events once they have completed, on a worker that does not log."""
        half = len(self._marks) // 2
        first = _Marks(self._marks[:half], self._marks[half][1], self._before)
        if first.is_ready:
            self._before, self._marks = first.value(), self._marks[half:]

    def take(self) -> AsyncValue:
        phase, now = self._marks[-1][0], event_now(self._device, enable_timing=True)
        taken = _Marks(self._marks, now, self._before)
        self._marks, self._before = [(phase, now)], zero_split()
        return taken


def stopwatch(phase: Phase, device: torch.device) -> Stopwatch:
    return DeviceStopwatch(phase, device) if device.type == "cuda" else HostStopwatch(phase)
