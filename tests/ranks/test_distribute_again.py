"""Guards `distribute` called again, in two halves, or after it was refused: the old pair ends, none trains alone silently."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fleetx import fleet
from tests.helpers.ddp_loops import STEPS, loss_of, make_pair, sgd, small_buckets, weights
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import mlp


def _again(rank: int, which: str, **parts: Any) -> tuple[Tensor, Tensor, str]:
    """Two updates, then distribute again and four more; beside it a pair of its own from the same state."""
    model = mlp(torch.float64)
    given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, first = fleet.distribute(model, given, small_buckets(**parts))
    for step in range(2):
        loss_of(model, rank, step).backward()
        first.step()
    fresh_model = mlp(torch.float64)
    fresh_model.load_state_dict(model.state_dict())
    fresh = torch.optim.SGD(fresh_model.parameters(), lr=0.1, momentum=0.9)
    state = copy.deepcopy(first.state_dict())
    again = {"the returned one": first, "the given one": given, "a new one": None}[which]
    if again is None:
        again = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        fresh.load_state_dict({**state, "param_groups": fresh.state_dict()["param_groups"]})
    model, second = fleet.distribute(model, again, small_buckets(**parts))
    _, other = fleet.distribute(fresh_model, fresh, small_buckets(**parts))
    for step in range(2, STEPS):
        second.minimize(loss_of(model, rank, step))
        other.minimize(loss_of(fresh_model, rank, step))
    return weights(model), weights(fresh_model), raised(first.step)


@pytest.mark.parametrize("which", ["the returned one", "the given one", "a new one"])
def test_distribute_once_more_ends_the_old_pair_and_goes_on_as_a_fresh_start_would(which: str) -> None:
    for mine, fresh, told in run_ranks(_again, 2, which):
        torch.testing.assert_close(mine, fresh, rtol=0, atol=0)
        assert told.startswith("ConfigError: this pair has ended: fleet.distribute(...) was called again"), told


def _again_with_lars(rank: int) -> Tensor:
    model = mlp(torch.float64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step % 3 == 0:
            model, optimizer = fleet.distribute(model, optimizer, small_buckets(lars=True))
        optimizer.minimize(loss_of(model, rank, step))
    return weights(model)


def _once_with_lars(rank: int) -> Tensor:
    model = mlp(torch.float64)
    model, optimizer = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), small_buckets(lars=True)
    )
    for step in range(STEPS):
        optimizer.minimize(loss_of(model, rank, step))
    return weights(model)


def test_a_cell_with_lars_run_twice_keeps_the_momentum() -> None:
    torch.testing.assert_close(run_ranks(_again_with_lars, 2)[0], run_ranks(_once_with_lars, 2)[0], rtol=0, atol=0)


def _half_of_two_calls(rank: int) -> list[str]:
    model = fleet.distributed_model(mlp(torch.float64))
    told = [raised(lambda: loss_of(model, rank, 0).backward())]
    optimizer = fleet.distributed_optimizer(sgd(model), small_buckets())
    model.zero_grad()
    loss_of(model, rank, 0).backward()
    told.append(raised(optimizer.step))
    return told


def test_a_model_that_has_met_no_optimizer_does_not_train_alone_silently() -> None:
    for alone, together in run_ranks(_half_of_two_calls, 2):
        assert alone.startswith("ConfigError: fleet.distributed_model(model) has met no optimizer yet"), alone
        assert together == "nothing raised"


def _refused_again(rank: int) -> list[str]:
    model, optimizer = make_pair()
    loss_of(model, rank, 0).backward()
    optimizer.step()
    told = [raised(lambda: fleet.distribute(model, optimizer, small_buckets(lamb=True)))]
    told.append(raised(lambda: loss_of(model, rank, 1).backward()))
    model.zero_grad()
    model, optimizer = fleet.distribute(model, sgd(model), small_buckets())
    loss_of(model, rank, 1).backward()
    told.append(raised(optimizer.step))
    return told


def test_a_model_whose_second_distribute_was_refused_does_not_train_alone_silently() -> None:
    for refused, alone, together in run_ranks(_refused_again, 2):
        assert refused.startswith("ConfigError: "), refused
        assert alone.startswith("ConfigError: this model has no pair: fleet.distribute(...) was called again"), alone
        assert refused.removeprefix("ConfigError: ").splitlines()[0] in alone
        assert together == "nothing raised"


def _two_calls_and_one(rank: int) -> str:
    """Both spellings mixed: a model that is a part of a distributed one, or distributed already, waits for no optimizer."""
    model, optimizer = make_pair()
    fleet.distributed_model(model)
    fleet.distributed_model(model[2])
    loss_of(model, rank, 0).backward()
    return raised(optimizer.step)


def test_distributed_model_of_a_model_that_is_distributed_already_changes_nothing() -> None:
    assert run_ranks(_two_calls_and_one, 2) == ["nothing raised"] * 2


def _unfrozen_between(rank: int) -> Tensor:
    """A head alone, then the whole model by a new optimizer and another call."""
    model = mlp(torch.float64)
    for p in model[0].parameters():
        p.requires_grad_(False)
    head = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = fleet.distribute(model, torch.optim.SGD(head, lr=0.1, momentum=0.9), small_buckets())
    for step in range(STEPS):
        if step == 3:
            for p in model[0].parameters():
                p.requires_grad_(True)
            model, optimizer = fleet.distribute(model, sgd(model), small_buckets())
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return weights(model)


def test_layers_that_are_unfrozen_before_a_second_call_train_with_the_mean_of_the_ranks() -> None:
    model = mlp(torch.float64)
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step == 3:
            for p in model[0].parameters():
                p.requires_grad_(True)
            optimizer = sgd(model)
        optimizer.zero_grad()
        ((loss_of(model, 0, step) + loss_of(model, 1, step)) / 2).backward()
        optimizer.step()
    for trained in run_ranks(_unfrozen_between, 2):
        torch.testing.assert_close(trained, weights(model), rtol=0, atol=1e-12)
