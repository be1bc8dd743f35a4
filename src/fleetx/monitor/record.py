"""One update as it is written down: asked for when it is logged, complete when the device has come so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from ..engine.noise_scale import noise_scale_of
from ..engine.report import Report
from .async_values import Awaited, Here, finite, number, told_of

DIGITS = 6


@final
class Record:
    """Of one update. Values may still be added to it until the next one comes."""

    def __init__(self, report: Report, plain: Mapping[str, Any], split: Awaited, *, is_full: bool, is_shown: bool) -> None:
        """`is_full`: with what is long, such as trust ratios. `is_shown`: of the pair whose loss is shown."""
        self._plain, self.is_shown = dict(plain), is_shown
        self.split = split
        self.loss = number(report.loss_on_device())
        self._awaited: dict[str, Awaited] = {"grad_norm": number(report.grad_norm_on_device()), "lr": _lr(report)}
        self._values: dict[str, Awaited] = {}
        noise, ratios = report.noise_on_device(), report.trust_ratios
        self._awaited["noise_scale"] = Here(None) if noise is None else told_of(noise, _noise_scale)
        self._awaited["density"] = Here(report.density)
        if is_full and ratios is not None and len(ratios):
            self._awaited["trust_ratios"] = told_of(ratios.on_device(), lambda tensor: _rounded(ratios.named(tensor)))

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
        return {**self._plain, "loss": self.loss.value(), **awaited, "split": split, "values": values}


def _lr(report: Report) -> Awaited:
    lr = report._lr
    return Here(finite(lr)) if isinstance(lr, float | int) else number(lr)


def _noise_scale(means: Tensor) -> float | None:
    scale = noise_scale_of(means)
    return None if scale is None else finite(scale)


def _rounded(ratios: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(float(f"{ratio:.{DIGITS}g}")) for name, ratio in ratios.items()}
