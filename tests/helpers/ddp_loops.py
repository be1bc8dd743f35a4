"""A loop run by ours and by DDP, on two ranks each: what loops that know nothing of us are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch, mlp

STEPS = 6
Loop = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def rows(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(step * 2 + rank, dtype=torch.float64)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = rows(rank, step)
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def small_buckets(**parts: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005, **parts)


def ours(rank: int, loop: Loop, **parts: Any) -> tuple[Tensor, Any]:
    model, optimizer = make_pair(**parts)
    seen = loop(model, optimizer, rank)
    return weights(model), seen


def make_pair(**parts: Any) -> tuple[nn.Module, Any]:
    model = mlp(torch.float64)
    return fleet.distribute(model, sgd(model), small_buckets(**parts))


def ddp(rank: int, loop: Loop) -> tuple[Tensor, Any]:
    model = mlp(torch.float64)
    wrapped = DistributedDataParallel(model)
    seen = loop(wrapped, sgd(model), rank)
    return weights(model), seen


def assert_as_under_ddp(loop: Loop, *, tolerance: float = 1e-12) -> list[Any]:
    """The same bits on both ranks, and DDP's numbers."""
    mine, theirs = run_ranks(ours, 2, loop), run_ranks(ddp, 2, loop)
    torch.testing.assert_close(mine[0][0], mine[1][0], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], theirs[0], rtol=tolerance, atol=tolerance)
    return mine


def plain_loop(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
