"""How a step grows with its batch, measured: at a size that fits with every unit computed again, and at half of it.

So much is known of batches that fit by a better plan only, segments or none: measuring them would not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..engine.dry_run import OutOfMemory, Sample
from ..engine.trees import map_tensors, tensors_in
from ..errors import ConfigError
from .batches import Growth
from .planner import Planner
from .profile import Profile

Units = Mapping[str, nn.Module]


def rows_of(sample: Any, size: int) -> Any:
    """A batch of this size, of the sample's rows, over and over: the first dimension of every tensor counts them."""
    return map_tensors(lambda tensor: tensor[torch.arange(size, device=tensor.device) % len(tensor)], sample)


def rows_in(sample: Any) -> set[int]:
    """How many rows its tensors have: one number, if they are a batch."""
    return {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(sample)}


def measured_growth(planner_for: Callable[[int, Units | None], Planner], size: int, *, who: str) -> tuple[Growth, Planner]:
    """At `size`, or the largest half, quarter, ... of it that fits at all; and the planner for that. Collective."""
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
    if not growth.is_alike():
        raise ConfigError(
            f"{who}: batches of {growth.small} and {growth.large} rows took other ways through the model, so nothing can be "
            "foretold from them. Give a larger sample."
        )
    return growth, large


def profile_from_smaller(planner: Planner) -> Profile | None:
    """Of a batch that cannot be measured itself; None if the sample has no rows to leave out. Collective.

    The ranks' batches may differ in size: each leaves out the same share of its own."""
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

    growth, of_part = measured_growth(planner_for, largest // 2, who="recompute")
    planner.units = dict(of_part.units)
    return growth.at(largest)
