"""Distribution with a budget, and everything that is left after it or after some training, to be compared."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from budget_nets import allocated_in, lasting_bytes
from fleetx import fleet
from fleetx.engine.state import counters
from fleetx.errors import ConfigError, FleetWarning
from recompute_runs import random_now, rows

Batch = tuple[Tensor, Tensor]
Build = Callable[[], nn.Module]
AMP: dict[str, dict[str, Any]] = {
    "bfloat16": {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
    "float16": {"amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 256.0}},
}
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def distribute(
    model: nn.Module,
    budget: int | str | None,
    batch: Any,
    *,
    loss_fn: Any = cross_entropy,
    checkpoints: list[str] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **strategy: Any,
) -> Any:
    """With None, without recompute."""
    if budget is not None:
        strategy |= {"recompute": True, "recompute_configs": {"budget": budget, "checkpoints": checkpoints or []}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16-bit arithmetic is slow on most CPUs, and says so
        chosen = fleet.DistributedStrategy(**strategy)
        if budget is None:
            return fleet.distribute(model, optimizer(model), chosen)
        return fleet.distribute(model, optimizer(model), chosen, sample=batch, loss_fn=loss_fn)


def bounds(build: Build, batch: Any, **settings: Any) -> tuple[int, int]:
    """The smallest budget and the bytes of a step without recompute, as the refusal of a budget of one byte tells them."""
    with pytest.raises(ConfigError) as refused:
        distribute(build(), 1, batch, **settings)
    told = str(refused.value)
    found = re.search(r'needs ([\d.]+) (.B) as it is .* Write "budget": (\d+)', told)
    assert found is not None, told
    del refused  # with it ends the pair that was refused, of which some backwards would know
    gc.collect()
    return int(found[3]), round(float(found[1]) * UNITS[found[2]])


def own_peak(model: nn.Module, optimizer: Any, batch: Batch, *, steps: int = 1) -> int:
    """Of a whole training step, the update included, by the profiler, and what lasted from before it."""
    for _ in range(steps):  # the optimizer's state is made by its first update
        optimizer.minimize(cross_entropy(model, batch))
    before = lasting_bytes(model, optimizer, batch)
    return before + allocated_in(lambda: optimizer.minimize(cross_entropy(model, batch))).peak


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights, buffers, modes, gradients, the optimizer's state, all random generators."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict(keep_vars=False).items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "optimizer": [{key: value for key, value in state.items()} for state in optimizer.state_dict()["state"].values()],
        "groups": optimizer.state_dict()["param_groups"],
        "counters": counters(optimizer.pipeline),
        "random": random_now(),
    }


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """To the bit."""
    assert ours.keys() == theirs.keys()
    for key in ours:
        if key in ("random", "modes", "counters", "groups"):
            assert ours[key] == theirs[key], key
        else:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0, equal_nan=True)


def train(model: nn.Module, optimizer: Any, *, updates: int = 5, merged: int = 1, count: int = 32) -> list[float]:
    losses = []
    for index in range(updates * merged):
        loss = cross_entropy(model, rows(index, count))
        losses.append(loss.item())
        optimizer.minimize(loss)
    return losses
