"""Check the arguments of a monitor; an error shows the line to write instead."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from ..engine.report import Report
from ..errors import ConfigError
from .async_values import AsyncValue, number
from .sinks import Sink


def path_of(dir: object) -> Path:
    if not isinstance(dir, str | os.PathLike) or not os.fspath(dir):
        raise ConfigError(f"dir is {dir!r}; it must be the folder of the run, such as fleet.Monitor('runs/first').")
    return Path(os.fspath(dir))


def total_of(total_steps: object) -> int | None:
    if total_steps is None or (isinstance(total_steps, int) and not isinstance(total_steps, bool) and total_steps >= 1):
        return total_steps
    raise ConfigError(f"total_steps is {total_steps!r}; it must be the number of updates, at least 1, or be omitted.")


def sinks_of(sinks: Iterable[Sink]) -> list[Sink]:
    checked = list(sinks)
    for sink in checked:
        if not isinstance(sink, Sink):
            raise ConfigError(f"the sink {sink!r} lacks write(record) or close(summary); see fleetx.monitor.Sink.")
    return checked


def require_report(report: object) -> None:
    if report is not None and not isinstance(report, Report):
        raise ConfigError(
            f"log() was given {type(report).__name__}; it takes what optimizer.minimize(loss) or optimizer.step() returns. "
            "Write other numbers by name: monitor.log(report, acc=0.9)."
        )


def samples_of(samples: object) -> int:
    if samples is None:
        return 0
    if isinstance(samples, int) and not isinstance(samples, bool) and samples >= 0:
        return samples
    raise ConfigError(f"samples is {samples!r}; it must be the number of samples in this rank's batch, such as len(x).")


def number_of(name: str, value: object) -> AsyncValue:
    if (isinstance(value, Tensor) and value.numel() == 1) or (
        not isinstance(value, Tensor | str) and hasattr(value, "__float__")
    ):
        return number(value)
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ConfigError(f"{name} is {shown}; log() takes one number for each name. Log its mean, or its parts by name.")
