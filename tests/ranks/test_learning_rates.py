"""Guards learning rates: schedulers, parameter groups and optimizers without a rate act as with the optimizer that was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from fleetx import fleet
from tests.helpers.harness import run_ranks
from tests.helpers.joined_batch import (
    STEPS,
    Optimizer,
    assert_trained_alike,
    joined_rows,
    net,
    plain_loop,
    quiet_about_speed,
    rows_of,
    sgd,
    weights,
)
from tests.helpers.models import batch, mlp


def _schedule(kind: str, optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=2, gamma=0.5) if kind == "StepLR" else LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _scheduled(rank: int, kind: str, when: str) -> tuple[Tensor, list[float]]:
    model = net()
    inner = sgd(model)
    scheduler = _schedule(kind, inner) if when == "before" else None
    model, optimizer = fleet.distribute(model, inner)
    scheduler = scheduler or _schedule(kind, optimizer)
    rates = []
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        report = optimizer.minimize(F.cross_entropy(model(x), y))
        assert report.due
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return weights(model), rates


def _plain_scheduled(kind: str) -> tuple[Tensor, list[float]]:
    model = net()
    optimizer = sgd(model)
    scheduler = _schedule(kind, optimizer)
    rates = []
    for step in range(STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return weights(model), rates


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["StepLR", "LambdaLR"])
def test_a_scheduler_made_before_or_after_distribute_sets_the_rate_that_is_used(kind: str, when: str) -> None:
    # torch warns of a scheduler that steps before its optimizer, or whose optimizer was exchanged: here that is an error.
    assert_trained_alike(run_ranks(_scheduled, 2, kind, when), _plain_scheduled(kind))


def _two_rates(model: nn.Module) -> torch.optim.SGD:
    first, second, *rest = list(model.parameters())
    groups = [{"params": [first, second], "lr": 0.3}, {"params": rest, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def _grouped(rank: int) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, _two_rates(model), fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model)


def test_parameter_groups_keep_their_own_rate_and_decay() -> None:
    assert_trained_alike(run_ranks(_grouped, 2), plain_loop(make_optimizer=_two_rates))


def _identities(rank: int) -> list[bool]:
    model = net()
    inner = _two_rates(model)
    groups, params = list(inner.param_groups), [p for group in inner.param_groups for p in group["params"]]
    _, optimizer = fleet.distribute(model, inner)
    now = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        optimizer.param_groups[0] is inner.param_groups[0],
        all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True)),
        all(a is b for a, b in zip(params, now, strict=True)),
        isinstance(optimizer, Optimizer),
    ]


def test_the_group_dicts_are_the_very_ones_of_the_optimizer_given() -> None:
    assert run_ranks(_identities, 2) == [[True] * 4] * 2


class WithoutRate(Optimizer):
    """An optimizer of the user's own. Adafactor with relative steps has no learning rate either: its lr is None."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)


def _without_rate(rank: int, defaults: dict[str, Any]) -> Tensor:
    model = net()
    model, optimizer = fleet.distribute(model, WithoutRate(model.parameters(), defaults))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}], ids=["no lr", "lr is None"])
def test_an_optimizer_without_a_learning_rate_is_driven_like_any_other(defaults: dict[str, Any]) -> None:
    reference = plain_loop(make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert_trained_alike(run_ranks(_without_rate, 2, defaults), reference)


def _first_update_skipped(rank: int, when: str) -> list[bool]:
    quiet_about_speed()
    model = mlp()
    inner = sgd(model)
    scheduler = StepLR(inner, step_size=1) if when == "before" else None
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "float16"})
    model, optimizer = fleet.distribute(model, inner, strategy)
    scheduler = scheduler or StepLR(optimizer, step_size=1)
    skipped = []
    for step in range(2):
        x, y = batch(step * 2 + rank)
        report = optimizer.minimize(F.cross_entropy(model(x), y) * (float("inf") if step == 0 else 1.0))
        skipped.append(report.skipped)
        scheduler.step()  # every due micro-step counts, skipped ones too
    return skipped


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_is_not_warned_about_when_the_first_update_is_skipped(when: str) -> None:
    assert run_ranks(_first_update_skipped, 2, when) == [[True, False]] * 2
