"""The batch of two ranks, joined for one process: what loops on two ranks are compared with, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.models import batch, cnn, mlp

STEPS = 6
TOLERANCE = 1e-12
Optimizer = torch.optim.Optimizer


def rows_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(step * 2 + rank, dtype=torch.float64)


def joined_rows(step: int) -> tuple[Tensor, Tensor]:
    (x0, y0), (x1, y1) = rows_of(0, step), rows_of(1, step)
    return torch.cat([x0, x1]), torch.cat([y0, y1])


def net() -> nn.Sequential:
    return mlp(torch.float64)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_equal_on_all_ranks(ranks: Sequence[Any]) -> None:
    for other in ranks[1:]:
        torch.testing.assert_close(other, ranks[0], rtol=0, atol=0)


def assert_trained_alike(ranks: Sequence[Any], reference: Any) -> None:
    """The same bits on all ranks, and the reference up to the order of additions."""
    assert_equal_on_all_ranks(ranks)
    torch.testing.assert_close(ranks[0], reference, rtol=TOLERANCE, atol=TOLERANCE)


def plain_loop(
    make: Callable[[], nn.Module] = net, make_optimizer: Callable[[nn.Module], Optimizer] = sgd, steps: int = STEPS
) -> Tensor:
    """One process, the joined batch, torch alone."""
    model = make()
    optimizer = make_optimizer(model)
    for step in range(steps):
        x, y = joined_rows(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


def quiet_about_speed() -> None:
    """On many CPUs 16 bits are slower than float32, and amp says so; warnings are errors in these processes."""
    warnings.filterwarnings("ignore", message="amp:")


def plain_merged_loop(period: int) -> Tensor:
    model = net()
    optimizer = sgd(model)
    for first in range(0, STEPS, period):
        losses = []
        for step in range(first, first + period):
            x, y = joined_rows(step)
            losses.append(F.cross_entropy(model(x), y))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def images_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(step * 2 + rank, shape=(1, 6, 6), dtype=torch.float64)


def ddp_on_images(rank: int, steps: int = STEPS) -> Tensor:
    model = cnn().double()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(model)
    for step in range(steps):
        x, y = images_of(rank, step)
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)
