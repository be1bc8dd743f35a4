"""What is planned for: a model, its optimizer and a sample; and pairs of them that are bound for a while, and given up again."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..binding import LossFn, bind, give_up, rehearsal_of
from ..comm import Comm
from ..errors import FleetWarning
from ..memory.measured_growth import rows_in, rows_of
from ..optimizer import FleetOptimizer
from ..rehearsal import Rehearsal, Sample
from ..strategy import DistributedStrategy


@final
@dataclass(slots=True)
class Subject:
    model: nn.Module
    optimizer: Optimizer
    sample: Any
    """One batch; or a function that makes one of so many rows."""
    loss_fn: LossFn | None
    comm: Comm
    device: torch.device
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the user's strategy that are no part, which every candidate keeps."""
    is_placed: bool = False
    begun: float = field(default_factory=time.perf_counter)

    _made: tuple[int, Any] | None = None

    def start_with(self, rows: int) -> None:
        """Where batches are made, with so many rows."""
        if callable(self.sample):
            self._made = rows, self.sample(rows)

    @property
    def batch(self) -> Any:
        return self.sample if self._made is None else self._made[1]

    @property
    def rows(self) -> int:
        """Of the batch; 0 where its tensors do not agree."""
        if self._made is not None:
            return self._made[0]
        counts = rows_in(self.sample)
        return counts.pop() if len(counts) == 1 else 0

    def of_rows(self, rows: int) -> Any:
        """A batch of another size."""
        return self.sample(rows) if callable(self.sample) else rows_of(self.sample, rows)

    def elapsed_s(self) -> float:
        """Collective: of the rank that is furthest."""
        return float(max(self.comm.gather_json(time.perf_counter() - self.begun)))

    def strategy(self, settings: Mapping[str, Any]) -> DistributedStrategy:
        return DistributedStrategy(**{**self.scalars, **settings})

    @contextlib.contextmanager
    def bound(self, settings: Mapping[str, Any], *, rows: int | None = None, settles: bool = False) -> Iterator[Rehearsal]:
        """A pair by these settings, for so many rows of the sample. `settles`: parts run the steps they need. Says nothing."""
        strategy, face = self.strategy(settings), FleetOptimizer(self.optimizer)
        with silence():
            bind(self.model, face, strategy, has_sample=True, is_placed=self.is_placed)
        self.is_placed = True
        try:
            rehearsal = rehearsal_of(self.model, face, self.batch, self.loss_fn)
            if rows is not None and rows != self.rows:
                rehearsal = self.resized(rehearsal, rows)
            if settles:
                with silence():
                    for part in strategy.parts():
                        part.rehearse(rehearsal)
            yield rehearsal
        finally:
            give_up(self.model, face)

    def resized(self, rehearsal: Rehearsal, rows: int) -> Rehearsal:
        """Collective."""
        sample = rehearsal.everywhere(lambda: Sample(self.of_rows(rows), rehearsal.device))
        return replace(rehearsal, sample=sample)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What a part has to say of a pair that is only tried is no news to the user."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        yield
