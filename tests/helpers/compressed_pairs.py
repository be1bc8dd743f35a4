"""A small model under a compressor: what tests of DGC and PowerSGD train."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.errors import FleetWarning

SPARSE = {"sparsity": [0.9], "min_numel": 50}
DGC = {"dgc": True, "dgc_configs": SPARSE}
POWERSGD = {"powersgd": True, "powersgd_configs": {"rank": 1, "begin_step": 0, "min_compression": 1.0}}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))


def pair(strategy: dict[str, Any], model: nn.Module | None = None, **sgd: Any) -> tuple[nn.Module, Any]:
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **sgd})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        found: tuple[nn.Module, Any] = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**strategy))
    return found


def step(model: nn.Module, optimizer: Any, update: int, rank: int = 0, **weight: Any) -> Any:
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * update + rank))
    return optimizer.minimize(nn.functional.mse_loss(model(x), x[:, :8]), **weight)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
