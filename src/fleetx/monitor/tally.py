"""What one pair has done so far in this start of the run, and how fast it goes."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..engine.report import Report

RECENT = 50
"""Updates over which speed and traffic are averaged."""


@dataclass(frozen=True)
class Window:
    """One update, with the micro-steps that led to it."""

    ended_seconds: float
    bytes_sent: int
    bytes_dense: int
    samples: int


@dataclass
class Tally:
    updates: int = 0
    skipped: int = 0
    samples: int = 0
    """Of all ranks."""
    bytes_sent: int = 0
    bytes_dense: int = 0
    _recent: collections.deque[Window] = field(default_factory=lambda: collections.deque(maxlen=RECENT))
    _open_bytes: int = 0
    _open_samples: int = 0

    def micro_step(self, bytes_sent: int, samples: int) -> None:
        self._open_bytes += bytes_sent
        self._open_samples += samples

    def update(self, report: Report, *, ranks: int, ended_seconds: float) -> Window:
        window = Window(ended_seconds, self._open_bytes, report.bytes_dense, self._open_samples * ranks)
        self._open_bytes = self._open_samples = 0
        self.updates += 1
        self.skipped += report.skipped
        self.samples += window.samples
        self.bytes_sent += window.bytes_sent
        self.bytes_dense += window.bytes_dense
        self._recent.append(window)
        return window

    def step_seconds(self) -> float | None:
        """Of an update, over the last ones."""
        if len(self._recent) < 2:
            return None
        return (self._recent[-1].ended_seconds - self._recent[0].ended_seconds) / (len(self._recent) - 1)

    def steps_per_second(self) -> float | None:
        seconds = self.step_seconds()
        return 1 / seconds if seconds else None

    def samples_per_second(self) -> float | None:
        seconds = self.step_seconds()
        samples = sum(window.samples for window in list(self._recent)[1:])
        return samples / (seconds * (len(self._recent) - 1)) if seconds and samples else None

    def wire(self) -> tuple[int, int]:
        """Bytes of an update over the last ones: sent, and those of a dense all-reduce."""
        count = max(len(self._recent), 1)
        sent, dense = sum(one.bytes_sent for one in self._recent), sum(one.bytes_dense for one in self._recent)
        return round(sent / count), round(dense / count)


def joined(tallies: Iterable[Tally]) -> Tally:
    """What all pairs have done."""
    whole = Tally()
    for one in tallies:
        whole.updates += one.updates
        whole.skipped += one.skipped
        whole.samples += one.samples
        whole.bytes_sent += one.bytes_sent
        whole.bytes_dense += one.bytes_dense
    return whole
