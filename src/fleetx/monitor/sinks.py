"""Send records to other places besides the run folder: an interface of two methods, and TensorBoard; others have own files."""

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
    """A receiver of records. It is called on worker 0 only, in the training thread: be quick, or use a thread of your own. A sink
    that raises is removed with a warning; training continues."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Receive the record of one update, as in metrics.jsonl."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Receive the summary at the end of the run, as in summary.json."""


@final
class Sinks:
    """The sinks of a run, without those that failed."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def write(self, record: Mapping[str, Any]) -> None:
        self._call(lambda sink: sink.write(record))

    def close(self, summary: Mapping[str, Any]) -> None:
        self._call(lambda sink: sink.close(summary))

    def _call(self, method: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                method(sink)
            except Exception as error:  # a full disk or a lost server must not end training
                self._sinks.remove(sink)
                reason = f"failed ({type(error).__name__}: {error}) and receives no more records"
                warn_user(f"the monitor's sink {type(sink).__name__} {reason}; training continues.")


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record under names with a slash, by which dashboards group them."""
    scalars = {f"fleetx/{name}": record.get(name) for name in PLAIN}
    scalars |= {f"seconds/{part}": seconds for part, seconds in record.get("split", {}).items()}
    scalars |= {f"trust_ratio/{layer}": ratio for layer, ratio in record.get("trust_ratios", {}).items()}
    scalars |= {f"values/{name}": value for name, value in record.get("values", {}).items()}
    pair = record.get("pair", 1)
    prefix = f"pair {pair}/" if pair > 1 else ""
    return {prefix + name: float(value) for name, value in scalars.items() if value is not None}


def summary_scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a summary, with the seconds of its split and its values."""
    plain = {name: value for name, value in summary.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    # A store of files has one for each name, and none may be a folder for others: so no "seconds/data" beside "seconds".
    split = {f"split/{part}": seconds for part, seconds in (summary.get("split") or {}).items()}
    values = {f"values/{name}": value for name, value in (summary.get("values") or {}).items()}
    return {name: float(value) for name, value in (plain | split | values).items()}


def has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


@final
class TensorBoard:
    """Writes event files to `tensorboard/` in the run folder, at most four updates a second, since each takes a millisecond;
    metrics.jsonl holds all of them."""

    def __init__(self, folder: Path) -> None:
        if not has_tensorboard():
            raise ConfigError('tensorboard=True, but it is not installed. Write: pip install "fleetx[tensorboard]"')
        with warnings.catch_warnings():  # raised by packages that it imports
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._next = 0.0
        self._skipped: Mapping[str, Any] | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        if time.monotonic() < self._next and not record["values"]:
            self._skipped = record
            return
        self._next, self._skipped = time.monotonic() + WRITE_SECONDS, None
        self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._skipped is not None:
            self._add(self._skipped)
        self._writer.close()
