"""What the ranks tell each other at an averaging: a row of numbers each, gathered on all of them.

Every decision about a round is a function of these rows, so that all ranks take the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dist.comm import Comm, Pending
from ..errors import FleetError

CALLS = ("averages by the schedule", "calls average()", "enters averaged()")
BY_SCHEDULE, ON_DEMAND, SHOWN = range(3)


class Row(NamedTuple):
    """One rank's news since the last round, as numbers that float64 holds exactly or well enough."""

    at: float = 0.0
    """Index of the last update that the rank has made."""
    call: float = 0.0
    """Number of the call that it is in: see `CALLS`."""
    stops: float = 0.0
    """Requests to stop."""
    failed_at: float = 0.0
    """The first update not made because its numbers were not finite and the strategy says stop; 0: none."""
    missing: float = 0.0
    """Parameters that got no gradient and should have."""
    scale: float = 1.0
    """The loss scale."""
    weight: float = 0.0
    """Sum of the weights given with the losses; 0 where none are given."""
    loss: float = 0.0
    lr: float = 0.0
    waited: float = 0.0
    """Seconds in which it waited for the others in the round before; below 0: there was none."""
    layout: float = 0.0
    """A mark of the optimizer state's layout, where that is averaged."""
    changed_tables: float = 0.0
    """Large buffers that it has written to since the ranks last had the same."""
    unequal_buffers: float = 0.0
    """Buffers outside norm layers whose mean, in the round before, was not its own. Not reported yet."""
    flips: float = 0.0
    """Whether weights have changed by themselves,"""
    mark: float = 0.0
    """and a mark of the weights that the round before has left on all ranks; 0: not known."""


def tell(row: Row, comm: Comm) -> tuple[Tensor, Pending]:
    """Send this rank's row to all; every rank calls it at the same place. Read the rows once the pending is waited for."""
    return comm.all_gather(torch.tensor(row, dtype=torch.float64, device=comm.control_device))


def rows_of(gathered: Tensor) -> list[Row]:
    return [Row(*numbers) for numbers in gathered.tolist()]


def require_together(rows: list[Row]) -> None:
    """Raise if one rank is in a round of the schedule and another in average(): they would average what does not belong
    together."""
    if len({(row.at, row.call) for row in rows}) > 1:
        told = ", ".join(f"rank {rank} {CALLS[int(row.call)]} after its update {int(row.at)}" for rank, row in enumerate(rows))
        raise FleetError(f"the ranks do not meet at the same place: {told}. Call average() and averaged() on every rank alike.")


def share_of(rows: list[Row], rank: int) -> float:
    """Return the share of a rank's delta in the mean: equal for all, or by the weights of what the rank was trained on."""
    total = sum(row.weight for row in rows)
    return rows[rank].weight / total if total > 0 else 1 / len(rows)
