"""One update as it is written down: asked for when it is logged, complete when the device has come so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from ..report import Report
from .later import Awaited, Here, finite, number

MINIMUM_DIGITS = 6


@final
class Record:
    """Of one update. Values may still be added to it until the next one comes."""

    def __init__(self, report: Report, plain: Mapping[str, Any], split: Awaited, *, reads: bool) -> None:
        """`reads`: also what takes a wait, such as trust ratios."""
        self._plain = dict(plain)
        self.split = split
        self.loss = number(report.loss_on_device())
        self._awaited: dict[str, Awaited] = {"grad_norm": number(report.grad_norm_on_device()), "lr": _lr(report)}
        self._values: dict[str, Awaited] = {}
        ratios = report.trust_ratios if reads else None
        self._read: dict[str, Any] = {
            "noise_scale": _finite_or_none(report.noise_scale) if reads else None,
            "density": report.density,
        }
        if ratios is not None and len(ratios):
            self._read["trust_ratios"] = {
                name: finite(float(f"{ratio:.{MINIMUM_DIGITS}g}")) for name, ratio in ratios.by_name.items()
            }

    def add(self, values: Mapping[str, Awaited]) -> None:
        self._values.update(values)

    def note(self, name: str, value: Any) -> None:
        self._plain[name] = value

    @property
    def is_here(self) -> bool:
        return all(one.is_here for one in (self.loss, self.split, *self._awaited.values(), *self._values.values()))

    def values(self) -> dict[str, float]:
        found = {name: one.value() for name, one in self._values.items()}
        return {name: value for name, value in found.items() if value is not None}

    def told(self) -> dict[str, Any]:
        """As a line of metrics.jsonl. Waits for what is not here."""
        split = {part: round(seconds, 9) for part, seconds in self.split.value().items()}
        awaited = {name: one.value() for name, one in self._awaited.items()}
        values = {name: one.value() for name, one in self._values.items()}
        return {**self._plain, "loss": self.loss.value(), **awaited, **self._read, "split": split, "values": values}


def _lr(report: Report) -> Awaited:
    lr = report._lr
    return Here(finite(lr)) if isinstance(lr, float | int) else number(lr)


def _finite_or_none(value: float | None) -> float | None:
    return None if value is None else finite(value)
