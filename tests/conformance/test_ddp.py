"""DDP is the oracle: the same parameters after 20 steps, for 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch, cnn, flat_state, mlp

STEPS = 20
MODELS: dict[str, Any] = {"mlp": (mlp, (8,)), "cnn": (cnn, (1, 6, 6))}


def _train_ours(rank: int, name: str, optimizer_name: str) -> torch.Tensor:
    make, shape = MODELS[name]
    model = make()
    optimizer: torch.optim.Optimizer = _optimizer(optimizer_name, model)
    model, ours = fleet.distribute(model, optimizer, fleet.DistributedStrategy(fuse_grad_size_in_MB=0.001))
    for step in range(STEPS):
        x, y = batch(step * 8 + rank, shape=shape)
        ours.minimize(F.cross_entropy(model(x), y))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _train_ddp(rank: int, name: str, optimizer_name: str) -> torch.Tensor:
    make, shape = MODELS[name]
    model = make()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = _optimizer(optimizer_name, model)
    for step in range(STEPS):
        x, y = batch(step * 8 + rank, shape=shape)
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_twenty_steps_equal_ddp(name: str, optimizer_name: str, size: int) -> None:
    ours = run_ranks(_train_ours, size, name, optimizer_name)
    theirs = run_ranks(_train_ddp, size, name, optimizer_name)
    for mine in ours[1:]:
        torch.testing.assert_close(mine, ours[0], rtol=0, atol=0)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)


def _buffers(rank: int) -> torch.Tensor:
    model = cnn()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(5):
        x, y = batch(step * 8 + rank, shape=(1, 6, 6))
        optimizer.minimize(F.cross_entropy(model(x), y))
    return flat_state(model)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_hold_the_same_bits_buffers_included(size: int) -> None:
    states = run_ranks(_buffers, size)
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)
