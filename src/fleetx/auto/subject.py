"""Hold what is planned for, a model, its optimizer and a sample, and bind them for a while by the settings that are tried."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import log
from ..config.progress import Tell, show_nothing
from ..dist.agree import Failures, run_on_all
from ..dist.comm import Comm
from ..engine.dry_run import OutOfMemory, Rehearsal, Sample, UpdateOutOfMemory, with_own_out_of_memory
from ..engine.modules import current_autocast
from ..engine.optimizer import FleetOptimizer
from ..engine.setup.bind import LossFn, bind, give_up, rehearsal_of
from ..errors import ConfigError, DataError, FleetError, FleetWarning, PeerError, first_line
from ..recompute.batches import rows_in, rows_of
from ..strategy import DistributedStrategy
from .fixed_parts import Fixed


@final
@dataclass(slots=True)
class Subject:
    model: nn.Module
    optimizer: Optimizer
    sample: Any
    """One batch; or a function of a number of rows that makes one."""
    loss_fn: LossFn | None
    comm: Comm
    device: torch.device
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the user's strategy beside its parts, which every candidate keeps."""
    fixed: Fixed = field(default_factory=Fixed)
    """Parts of the user's strategy, which every candidate keeps."""
    is_placed: bool = False
    begun: float = field(default_factory=time.perf_counter)
    tell: Tell = show_nothing
    """Shows what is being measured or tried."""

    rows: int = 0
    """Rows of a batch, the same on all ranks; 0 where they differ, or cannot be counted."""
    rows_of_ranks: list[int] = field(default_factory=list)
    batch: Any = None

    def start_with(self, rows: int) -> None:
        """Make a batch of so many rows where a function makes them; else take the one given. Collective."""
        made = self.made(rows) if callable(self.sample) else self.sample
        counts = {rows} if callable(self.sample) else rows_in(made)
        self.rows_of_ranks = self.comm.gather_json(counts.pop() if len(counts) == 1 else 0)
        self.batch, self.rows = made, self.rows_of_ranks[0] if len(set(self.rows_of_ranks)) == 1 else 0

    def made(self, rows: int) -> Any:
        """Make a batch of so many rows. Collective: the user's function may fail on one rank alone, and then all ranks raise."""
        return run_on_all(
            self.comm,
            lambda: self.of_rows(rows),
            report=lambda error: f"a batch of {rows} rows cannot be made of the sample: {type(error).__name__}: {error}",
            fails=lambda failures: ConfigError(f"auto: {failures.first[1]}"),
        )

    def few_rows(self) -> int | None:
        """Return how many rows are enough for gradients, which are as large of few rows as of many; None: all rows."""
        return max(4, self.rows // 8) if self.rows > 8 else None

    def of_rows(self, rows: int) -> Any:
        """Make a batch of another size."""
        return self.sample(rows) if callable(self.sample) else rows_of(self.sample, rows)

    def elapsed_s(self) -> float:
        """Return the seconds since planning began, on the rank that began first. Collective."""
        return float(max(self.comm.gather_json(time.perf_counter() - self.begun)))

    def strategy(self, settings: Mapping[str, Any]) -> DistributedStrategy:
        return DistributedStrategy(**{**self.scalars, **settings, **self.fixed.settings})

    def strategy_tried(self, settings: Mapping[str, Any], *, recomputes: bool) -> DistributedStrategy:
        """Make a strategy without what would stop updates that are only timed: one sample, over and over, may well diverge."""
        calm = {name: value for name, value in self.scalars.items() if name not in ("noise_scale_steps", "on_nan_inf")}
        return DistributedStrategy(**{**calm, "on_nan_inf": "skip", **self.fixed.timed(settings, recomputes=recomputes)})

    @contextlib.contextmanager
    def bound(self, settings: Mapping[str, Any], *, rows: int | None = None, settles: bool = False) -> Iterator[Rehearsal]:
        """Bind a pair by these settings and the fixed parts, for so many rows of the sample; nothing is printed. `settles`: the
        user's own recompute is one of these parts, and parts run the steps they need."""
        strategy, face = self.strategy_tried(settings, recomputes=settles), FleetOptimizer(self.optimizer)
        rehearsal = self._bind(face, strategy)
        with contextlib.ExitStack() as ends:
            ends.callback(give_up, self.model, face)
            ends.enter_context(current_autocast.used_by(face))
            if rows is not None and rows != self.rows:
                rehearsal = self.resized(rehearsal, rows)
            if settles:
                with silence():
                    for part in strategy.parts():
                        part.rehearse(rehearsal)
            yield rehearsal

    def _bind(self, face: FleetOptimizer, strategy: DistributedStrategy) -> Rehearsal:
        """Bind. Collective: buckets and the batch take memory, and all ranks raise if one of them runs out of it."""

        def bind_here() -> Rehearsal:
            with silence():
                bind(self.model, face, strategy, has_sample=True, is_placed=self.is_placed)
            return rehearsal_of(self.model, face, self.batch, self.loss_fn)

        def fails(failures: Failures) -> OutOfMemory:
            if failures.own is None:
                give_up(self.model, face)
            rank, text = failures.first
            return OutOfMemory(f"on rank {rank}: {text}")

        rehearsal = run_on_all(
            self.comm,
            lambda: with_own_out_of_memory(bind_here) if self.is_placed else bind_here(),
            catches=OutOfMemory,  # other errors are those of `bind`, which all ranks have
            fails=fails,
        )
        self.is_placed = True
        return rehearsal

    def resized(self, rehearsal: Rehearsal, rows: int) -> Rehearsal:
        """Return the rehearsal with another batch. Collective."""
        sample = agreed(rehearsal, lambda: Sample(self.of_rows(rows), rehearsal.device))
        return replace(rehearsal, sample=sample)


Found = TypeVar("Found")


def agreed(rehearsal: Rehearsal, work: Callable[[], Found]) -> Found:
    """Run work on every rank; raise a FleetError on all ranks if it failed on some, so that all go on or none does."""
    try:
        return rehearsal.everywhere(work)
    except FleetError:
        raise
    except Exception as error:
        raise FleetError(f"{type(error).__name__}: {first_line(error)}") from error


def raise_if_alone(error: FleetError) -> None:
    """Raise errors that the other ranks do not have: to go on would leave this one in other collectives than they are in."""
    if isinstance(error, UpdateOutOfMemory | DataError | PeerError):
        raise error


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what parts print and warn of: a pair that is only tried is no news to the user."""
    with contextlib.redirect_stdout(io.StringIO()), log.muted(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        yield
