"""Collect the record of one update: requested when it is logged, complete when the device has computed its values."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from ..engine.noise_scale import noise_scale_of
from ..engine.report import Report
from .async_values import AsyncValue, ReadyValue, finite, number, read_async

DIGITS = 6


@final
class Record:
    """The record of one update. Values may be added until the next update."""

    def __init__(self, report: Report, plain: Mapping[str, Any], split: AsyncValue, *, is_full: bool, is_shown: bool) -> None:
        """Request the values. `is_full`: include trust ratios. `is_shown`: the record is of the pair whose loss is shown."""
        self._plain, self.is_shown, self._report = dict(plain), is_shown, report
        self.split = split
        self.loss = number(report.loss_on_device())
        self._awaited: dict[str, AsyncValue] = {"grad_norm": number(report.grad_norm_on_device()), "lr": _lr(report)}
        self._values: dict[str, AsyncValue] = {}
        noise, ratios = report.noise_on_device(), report.trust_ratios_on_device()
        self._awaited["noise_scale"] = ReadyValue(None) if noise is None else read_async(noise, _noise_scale)
        self._awaited["density"] = ReadyValue(report.density)
        if is_full and ratios is not None and len(ratios):
            self._awaited["trust_ratios"] = read_async(ratios.on_device(), lambda tensor: _rounded(ratios.named(tensor)))

    def add(self, values: Mapping[str, AsyncValue]) -> None:
        self._values.update(values)

    def note(self, name: str, value: Any) -> None:
        self._plain[name] = value

    @property
    def is_ready(self) -> bool:
        return self._report.knows_outcome and all(
            one.is_ready for one in (self.loss, self.split, *self._awaited.values(), *self._values.values())
        )

    @property
    def skipped(self) -> bool:
        return self._report.skipped

    def values(self) -> dict[str, float]:
        values = {name: one.value() for name, one in self._values.items()}
        return {name: value for name, value in values.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """Return the record as in metrics.jsonl. Waits for values that are not ready."""
        split = {part: round(seconds, 9) for part, seconds in self.split.value().items()}
        awaited = {name: one.value() for name, one in self._awaited.items()}
        values = {name: one.value() for name, one in self._values.items()}
        if self.skipped:
            awaited.pop("trust_ratios", None)
        outcome = {"updated": self._report.updated, "skipped": self.skipped}
        return {**self._plain, **outcome, "loss": self.loss.value(), **awaited, "split": split, "values": values}


def _lr(report: Report) -> AsyncValue:
    lr = report._lr
    return ReadyValue(finite(lr)) if isinstance(lr, float | int) else number(lr)


def _noise_scale(means: Tensor) -> float | None:
    scale = noise_scale_of(means)
    return None if scale is None else finite(scale)


def _rounded(ratios: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(float(f"{ratio:.{DIGITS}g}")) for name, ratio in ratios.items()}


# --- totals and speed of one pair in this start of the run --------------------------------------------------------------

RECENT = 50
"""Number of last updates over which speed and traffic are averaged."""


@dataclass(frozen=True)
class Window:
    """Totals of one update and its micro-steps."""

    ended_seconds: float
    bytes_sent: int
    bytes_dense: int
    samples: int


@dataclass
class Tally:
    updates: int = 0
    samples: int = 0
    """Samples of all ranks together."""
    flops: float | None = None
    """Floating-point operations of one update on all ranks, as counted in the first one; None: not counted."""
    _counted_samples: int = 0
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
        self.samples += window.samples
        self.bytes_sent += window.bytes_sent
        self.bytes_dense += window.bytes_dense
        self._recent.append(window)
        return window

    def note_flops(self, flops: int, window: Window, *, ranks: int) -> None:
        """Keep the operations that were counted in an update of this rank."""
        self.flops, self._counted_samples = flops * ranks, window.samples

    def flops_of(self, updates: int, samples: int) -> float | None:
        """Return the operations of so many updates on all ranks, in proportion to their samples where these are logged."""
        if self.flops is None:
            return None
        return self.flops * (samples / self._counted_samples if samples and self._counted_samples else updates)

    def flops_per_second(self) -> float | None:
        """Return the speed of the last updates; None before the second."""
        seconds, recent = self.step_seconds(), list(self._recent)[1:]
        counted = self.flops_of(len(recent), sum(window.samples for window in recent))
        return None if counted is None or not seconds else counted / (seconds * len(recent))

    def step_seconds(self) -> float | None:
        """Return the mean seconds of the last updates; None before the second."""
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
        """Return mean bytes of the last updates: sent, and of a dense all-reduce."""
        count = max(len(self._recent), 1)
        sent, dense = sum(one.bytes_sent for one in self._recent), sum(one.bytes_dense for one in self._recent)
        return round(sent / count), round(dense / count)


def total_of(tallies: Iterable[Tally]) -> Tally:
    """Add up the totals of all pairs."""
    whole = Tally()
    for one in tallies:
        whole.updates += one.updates
        whole.samples += one.samples
        whole.bytes_sent += one.bytes_sent
        whole.bytes_dense += one.bytes_dense
    return whole
