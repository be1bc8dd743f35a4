"""Guards copies of distributed models: an average that follows it, independent ones, one saved whole, what keeps a pair alive."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.joined_batch import (
    STEPS,
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


def _ema(rank: int, made: str) -> tuple[Tensor, Tensor]:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    averaged: AveragedModel | None = None
    for step in range(STEPS):
        if averaged is None and (made == "at once" or step == 2):
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
        if averaged is not None:
            averaged.update_parameters(model)
    assert averaged is not None
    return weights(averaged.module), averaged(rows_of(0, 99)[0]).detach()


def _plain_ema(made: str) -> tuple[Tensor, Tensor]:
    model = net()
    optimizer = sgd(model)
    average: Tensor | None = weights(model).clone() if made == "at once" else None
    updates = 0
    for step in range(STEPS):
        if step == 2 and average is None:
            average = weights(model).clone()
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            # The first update of an AveragedModel takes the weights as they are.
            average = weights(model).clone() if updates == 0 else 0.9 * average + 0.1 * weights(model)
            updates += 1
    assert average is not None
    nn.utils.vector_to_parameters(average, model.parameters())
    return average, model(rows_of(0, 99)[0]).detach()


@pytest.mark.parametrize("made", ["at once", "in mid-training"])
def test_an_ema_copy_made_after_distribute_follows_the_weights(made: str) -> None:
    assert_trained_alike(run_ranks(_ema, 2, made), _plain_ema(made))


def _independent_copy(rank: int, amp: bool, trained: bool) -> dict[str, Any]:
    quiet_about_speed()
    model = mlp()
    strategy = fleet.DistributedStrategy(amp=amp, amp_configs={"dtype": "bfloat16"}) if amp else fleet.DistributedStrategy()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    if trained:
        x, y = batch(rank)
        optimizer.minimize(F.cross_entropy(model(x), y))
    averaged = AveragedModel(model)
    x, y = batch(50)
    plain = mlp()
    plain.load_state_dict(averaged.module.state_dict())
    before = averaged(x).detach()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    after = averaged(x).detach()
    F.cross_entropy(averaged(x), y).backward()
    return {
        "class kept": type(averaged.module) is type(plain),
        "moved": not torch.equal(before, after),
        "computes as a plain module": torch.equal(before, plain(x).detach()),
        "gradients of the original": [p.grad is not None for p in model.parameters()],
        "step after the copy's backward": raised(optimizer.step),
        "second copy": torch.equal(copy.deepcopy(averaged)(x).detach(), before),
    }


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_copy_computes_with_its_own_weights_and_is_none_of_our_business(amp: bool, trained: bool) -> None:
    for seen in run_ranks(_independent_copy, 2, amp, trained):
        assert seen["class kept"]
        assert not seen["moved"]
        assert seen["computes as a plain module"]
        assert not any(seen["gradients of the original"])
        assert "found no new gradients" in seen["step after the copy's backward"]
        assert seen["second copy"]


def _saved_whole(rank: int, amp: bool, trained: bool) -> bool:
    quiet_about_speed()
    model = mlp()
    strategy = fleet.DistributedStrategy(amp=amp, amp_configs={"dtype": "bfloat16"}) if amp else fleet.DistributedStrategy()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    x, y = batch(rank)
    if trained:
        optimizer.minimize(F.cross_entropy(model(x), y))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    return torch.equal(loaded(x), plain(x))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_model_saved_whole_loads_as_a_plain_module(amp: bool, trained: bool) -> None:
    assert run_ranks(_saved_whole, 2, amp, trained) == [True, True]


def _discarded(rank: int) -> Tensor:
    model = net()
    model, first = fleet.distribute(model, sgd(model))
    scheduler = StepLR(first, step_size=1)
    x, y = rows_of(rank, 99)
    first.backward(F.cross_entropy(model(x), y))
    first.zero_grad()
    del first, scheduler
    model, second = fleet.distribute(model, sgd(model))
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        second.minimize(F.cross_entropy(model(x), y))
    return weights(model)


def test_a_discarded_pair_gives_its_parameters_free() -> None:
    assert_trained_alike(run_ranks(_discarded, 2), plain_loop())


def _kept_alive(rank: int) -> bool:
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    x, y = rows_of(rank, 0)
    large = torch.zeros(1000)  # a loaded checkpoint, say: a local of the training function, dropped later
    reference = weakref.ref(large)
    optimizer.minimize(F.cross_entropy(model(x), y))
    del large
    gc.collect()
    return reference() is not None


def test_nothing_of_the_callers_locals_is_kept_alive_by_the_first_forward() -> None:
    assert run_ranks(_kept_alive, 2) == [False, False]
