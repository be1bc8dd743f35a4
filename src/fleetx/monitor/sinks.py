"""Where records go besides the run folder: an interface of two methods, and TensorBoard."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

from ..errors import ConfigError, warn_user

WRITE_SECONDS = 0.25
PLAIN = ("loss", "lr", "grad_norm", "loss_scale", "period", "noise_scale", "density", "memory_bytes", "bytes_sent", "bytes_dense")


@runtime_checkable
class Sink(Protocol):
    """Called on worker 0 alone, in the thread that trains: be quick, or hand over to a thread of your own. One that raises is
    warned of and called no more; training goes on."""

    def write(self, record: Mapping[str, Any]) -> None:
        """One update, as in metrics.jsonl."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run ends, as in summary.json."""


@final
class Sinks:
    """Those of a run, less the ones that failed."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def write(self, record: Mapping[str, Any]) -> None:
        self._tell(lambda sink: sink.write(record))

    def close(self, summary: Mapping[str, Any]) -> None:
        self._tell(lambda sink: sink.close(summary))

    def _tell(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # a disk that is full, a server that is gone: no reason to end a training
                self._sinks.remove(sink)
                told = f"{type(sink).__name__} failed ({type(error).__name__}: {error}) and gets no more of this run"
                warn_user(f"the monitor's sink {told}; training goes on.")


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record under names with a slash, as dashboards group them."""
    found = {f"fleetx/{name}": record.get(name) for name in PLAIN}
    found |= {f"seconds/{part}": seconds for part, seconds in record.get("split", {}).items()}
    found |= {f"trust_ratio/{layer}": ratio for layer, ratio in record.get("trust_ratios", {}).items()}
    found |= {f"values/{name}": value for name, value in record.get("values", {}).items()}
    pair = record.get("pair", 1)
    prefix = f"pair {pair}/" if pair > 1 else ""
    return {prefix + name: float(value) for name, value in found.items() if value is not None}


def has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


@final
class TensorBoard:
    """Event files in `tensorboard/` of the run folder. A few updates a second: one takes it a millisecond, and metrics.jsonl has
    them all."""

    def __init__(self, folder: Path) -> None:
        if not has_tensorboard():
            raise ConfigError('tensorboard=True, but it is not installed. Write: pip install "fleetx[tensorboard]"')
        with warnings.catch_warnings():  # of packages that it brings along
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._next = 0.0
        self._left: Mapping[str, Any] | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        if time.monotonic() < self._next and not record["values"]:
            self._left = record
            return
        self._next, self._left = time.monotonic() + WRITE_SECONDS, None
        self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._left is not None:
            self._add(self._left)
        self._writer.close()
