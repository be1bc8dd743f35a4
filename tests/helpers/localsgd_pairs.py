"""A small model under Local SGD: what tests of buffers, windows, errors, checkpoints and rounds train."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.localsgd_runs import loss_of

NAN = float("nan")
FINE = "nothing raised"


def local(**configs: Any) -> dict[str, Any]:
    return {"localsgd": True, "localsgd_configs": configs}


def pair(model: nn.Module, strategy: dict[str, Any], lr: float = 0.1) -> tuple[nn.Module, Any]:
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=lr), fleet.DistributedStrategy(**strategy))


def train(rank: int, model: nn.Module, optimizer: Any, first: int, last: int, *, bad: int = 0) -> list[Tensor]:
    """The first layer's weights after each of these updates; at `bad` rank 1's loss is NaN."""
    seen = []
    for update in range(first, last + 1):
        loss = loss_of(model, rank, update)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)  # of a skip
            optimizer.minimize(loss * NAN if rank == 1 and update == bad else loss)
        seen.append(next(model.parameters()).detach().clone())
    return seen


def same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


class Slope(nn.Module):
    """One weight, which the loss pulls down by a slope that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, slope: float) -> Tensor:
        return self.weight * slope
