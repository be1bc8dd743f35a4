"""Guards scripts that keep their DistributedDataParallel line: two reducers on one model's gradients are refused on all ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, flat_state, mlp

STEPS = 3


def _two_reducers(rank: int, order: str) -> tuple[str, bool]:
    """The error of the first training forward of the wrapper, and whether a weight has changed by then."""
    model: nn.Module = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: nn.Module
    if order == "fleetx, then DDP":
        fleet.distribute(model, optimizer)
        wrapped = DistributedDataParallel(model)
    elif order == "DDP, but its module distributed":
        wrapped = DistributedDataParallel(model)
        fleet.distribute(model, optimizer)
    else:
        fleet.distribute(model, optimizer)
        wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), model))
    before = flat_state(model)
    x, y = batch(rank)

    def train() -> None:
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return raised(train), torch.equal(before, flat_state(model))


@pytest.mark.parametrize("order", ["fleetx, then DDP", "DDP, but its module distributed", "fleetx, then DDP of a larger model"])
def test_a_distributed_model_called_through_another_ddp_wrapper_is_refused_with_the_lines_to_write(order: str) -> None:
    for message, unchanged in run_ranks(_two_reducers, 2, order):
        assert message.startswith("ConfigError: the model that fleet.distribute(...) has prepared is called"), message
        assert "Leave the line model = DistributedDataParallel(model) out" in message
        assert "model, optimizer = fleet.distribute(model, optimizer, strategy) with the wrapper" in message
        assert unchanged


def _each_its_own(rank: int, wrapped: bool) -> torch.Tensor:
    """A model in DDP that is no pair's, one of a pair that was given its wrapper, and a wrapper that only evaluates."""
    teacher = DistributedDataParallel(nn.Linear(8, 8))
    model: nn.Module = mlp()
    evaluates = DistributedDataParallel(model)
    kept = DistributedDataParallel(model) if wrapped else model
    kept, optimizer = fleet.distribute(kept, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        x, y = batch(2 * step + rank)
        with torch.no_grad():
            evaluates(x)
        teacher(x).square().mean().backward()
        F.cross_entropy(kept(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat_state(model)


@pytest.mark.parametrize("wrapped", [False, True])
def test_wrappers_of_other_models_and_those_that_only_evaluate_stay_allowed(wrapped: bool) -> None:
    mine = run_ranks(_each_its_own, 2, wrapped)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            x, y = batch(2 * step + rank)
            (F.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], flat_state(model), rtol=1e-5, atol=1e-6)


def test_the_check_needs_no_attribute_that_another_torch_may_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(AttributeError):
        monkeypatch.delattr(DistributedDataParallel, "_active_ddp_module")
    model, optimizer = fleet.distribute(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(0)
    assert optimizer.minimize(F.cross_entropy(model(x), y)).updated
