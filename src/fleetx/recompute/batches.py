"""Predict how a step grows with its batch, and split a global batch into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..engine.dry_run import OutOfMemory, Sample
from ..engine.modules.compiling import for_any_size
from ..engine.modules.nested_tensors import map_tensors, tensors_in
from ..errors import ConfigError
from .planner import Planner
from .profile import KINDS, Profile, Way


@dataclass(frozen=True, slots=True)
class Growth:
    """The profiles of one model at two batch sizes."""

    small: int
    """Rows of the smaller batch."""
    of_small: Profile
    large: int
    """Rows of the larger batch."""
    of_large: Profile

    def is_comparable(self) -> bool:
        """Return whether both batches took the same path through the model."""
        return self.of_small.is_like(self.of_large)

    def at(self, batch: int) -> Profile:
        """Predict the profile of another batch: a straight line through both, for every number."""

        def line(low: float, high: float) -> float:
            return low + (high - low) * (batch - self.small) / (self.large - self.small)

        def way(low: Way | None, high: Way | None) -> Any:
            if low is None or high is None:
                return None
            return Way(
                high.kept,
                forward_extra=round(line(low.forward_extra, high.forward_extra)),
                backward_extra=round(line(low.backward_extra, high.backward_extra)),
                seconds=max(low.seconds / 4, line(low.seconds, high.seconds)),  # the line may reach 0 for a very small batch
                brought=round(line(low.brought, high.brought)),
                offloaded=round(line(low.offloaded, high.offloaded)),
            )

        elements = [
            replace(high, **{kind: way(getattr(low, kind), getattr(high, kind)) for kind in KINDS})
            for low, high in zip(self.of_small.elements, self.of_large.elements, strict=True)
        ]
        floor = max(self.of_small.floor, round(line(self.of_small.floor, self.of_large.floor)))
        sizes = {s: max(0, round(line(self.of_small.sizes[s], self.of_large.sizes[s]))) for s in self.of_large.sizes}
        return replace(self.of_large, elements=tuple(elements), sizes=sizes, floor=floor)


def largest_that(fits: Callable[[int], bool], *, at_most: int) -> int:
    """Find the largest number from 1 to `at_most` that fits, if all below it fit too; 0 if none does."""
    low, high = 0, 1
    while high <= at_most and fits(high):
        low, high = high, 2 * high
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def merged(global_batch: int, *, ranks: int, largest: int) -> tuple[int, int]:
    """Return the fewest micro-steps that make up the global batch exactly, and their batch, which is at most `largest`."""
    if global_batch % ranks:
        raise ConfigError(
            f"global_batch is {global_batch}, which {ranks} ranks cannot share equally. Write a multiple of {ranks}, such as "
            f"{global_batch - global_batch % ranks or ranks}."
        )
    share = global_batch // ranks
    steps = next(k for k in range(-(-share // largest), share + 1) if share % k == 0)
    return steps, share // steps


def sizes_to_try(stored: int, largest: int, *, count: int = 5) -> Sequence[int]:
    """List the batches to time: the largest without recompute, the largest of all, and some between and below.

    Beyond a size that fills the device, a larger batch only costs memory."""
    sizes = {largest, stored or largest}
    sizes |= {max(1, (stored or largest) // 2), max(1, (stored or largest) * 3 // 4)}
    if stored and largest > stored:
        sizes |= {max(1, round(stored * (largest / stored) ** (i / (count - 2)))) for i in range(1, count - 2)}
    return sorted(sizes)


# --- growth measured at a size that fits with every unit computed again, and at half of it ----------------------------
#
# Larger batches fit only by segments or host memory, and cannot be measured: a measured step needs all inputs of units.

Units = Mapping[str, nn.Module]


def rows_of(sample: Any, size: int) -> Any:
    """Make a batch of this size by repeating the sample's rows, which the first dimension of every tensor counts."""
    return map_tensors(lambda tensor: tensor[torch.arange(size, device=tensor.device) % len(tensor)], sample)


def rows_in(sample: Any) -> set[int]:
    """Return the row counts of the sample's tensors: one number, if they are a batch."""
    return {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(sample)}


def measured_growth(planner_for: Callable[[int, Units | None], Planner], size: int, *, who: str) -> tuple[Growth, Planner]:
    """Measure the growth at `size`, or at the largest half, quarter, ... of it that fits; return also its planner. Collective."""
    while True:
        try:
            large = planner_for(size, None)
            of_large = large.profile()
            small = max(1, size // 2)
            if small == size:
                raise ConfigError(f"{who}: a sample of at least 2 rows is needed, to see how a step grows with its batch.")
            growth = Growth(small, planner_for(small, large.units).profile(), size, of_large)
            break
        except OutOfMemory as error:
            if size <= 2:
                raise ConfigError(f"{who}: not even a batch of 2 fits into this device's memory ({error}).") from None
            size = max(2, size // 2)
    if not growth.is_comparable():
        raise ConfigError(
            f"{who}: batches of {growth.small} and {growth.large} rows took different paths through the model, so nothing can be "
            "predicted from them. Give a larger sample."
        )
    return growth, large


def profile_from_smaller(planner: Planner) -> Profile | None:
    """Predict the profile of a sample that cannot be measured, from parts of it; None if it has too few rows. Collective.

    The ranks' samples may differ in size: each leaves out the same share of its own."""
    rehearsal = planner.rehearsal
    counts = rows_in(rehearsal.sample.source)
    own = counts.pop() if len(counts) == 1 else 0
    of_ranks = rehearsal.comm.gather_json(own)
    largest = max(of_ranks)
    if min(of_ranks) < 4:
        return None

    def planner_for(size: int, units: Units | None) -> Planner:
        rows = max(1, own * size // largest)
        sample = rehearsal.everywhere(lambda: Sample(rows_of(rehearsal.sample.source, rows), rehearsal.device))
        return planner.for_sample(sample, units)

    with for_any_size(rehearsal.model):
        growth, of_part = measured_growth(planner_for, largest // 2, who="recompute")
    planner.units = dict(of_part.units)
    return growth.at(largest)
