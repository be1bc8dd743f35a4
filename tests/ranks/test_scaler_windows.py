"""Guards a GradScaler by hand over gradients that are local when it looks at them: all ranks skip, and scales stay equal."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, flat_state, mlp

STEPS = 6


def _scaled(rank: int, api: str, rebound: bool, unscales: bool, fused: bool, local_steps: tuple[int, ...]) -> Any:
    """`local_steps`: updates whose only backward runs inside no_sync, as in a short last window. One has an infinity."""
    torch.manual_seed(0)
    inner = mlp()
    optimizer: Any = torch.optim.Adam(inner.parameters(), lr=0.01, fused=fused)
    model: nn.Module = inner
    if api == "fleetx":
        model, returned = fleet.distribute(inner, optimizer)
        optimizer = returned if rebound else optimizer
    else:
        model = DistributedDataParallel(inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales = []
    for step in range(STEPS):
        x, y = batch(step * 2 + rank)
        loss = F.cross_entropy(model(x), y)
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        with fleet.no_sync() if api == "fleetx" and step in local_steps else contextlib.nullcontext():
            scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return flat_state(inner), scales


@pytest.mark.parametrize("local_steps", [(2,), tuple(range(STEPS))], ids=["one window", "every window"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("rebound", [False, True])
def test_a_window_that_is_wholly_local_is_reduced_before_the_scaler_judges_it(
    rebound: bool, unscales: bool, fused: bool, local_steps: tuple[int, ...]
) -> None:
    mine = run_ranks(_scaled, 2, "fleetx", rebound, unscales, fused, local_steps)
    theirs = run_ranks(_scaled, 2, "ddp", True, unscales, fused, local_steps)
    torch.testing.assert_close(mine[0][0], mine[1][0], rtol=0, atol=0)
    torch.testing.assert_close(mine[0][0], theirs[0][0], rtol=1e-5, atol=1e-5)  # of Adam: a small gradient's sign may turn
    assert mine[0][1] == mine[1][1] == theirs[0][1]
    assert 512.0 in mine[0][1], "or nothing was skipped"


def _second_optimizer(rank: int) -> tuple[Tensor, float]:
    """An optimizer made later over the same parameters, as for a second phase."""
    model, _ = fleet.distribute(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        x, y = batch(step * 2 + rank)
        loss = F.cross_entropy(model(x), y)
        with fleet.no_sync():
            scaler.scale(loss * float("inf") if step == 1 and rank == 1 else loss).backward()
        scaler.step(later)
        scaler.update()
        later.zero_grad()
    return flat_state(model), scaler.get_scale()


def test_a_scaler_that_steps_an_optimizer_made_later_skips_on_all_ranks_too() -> None:
    (mine, scale), (theirs, other) = run_ranks(_second_optimizer, 2)
    assert scale == other == 512.0
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert bool(mine.isfinite().all())


def _local_after_unscaling(rank: int) -> str:
    model, optimizer = fleet.distribute(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = batch(rank)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    with fleet.no_sync():
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    return raised(lambda: scaler.step(optimizer))


def test_gradients_that_the_scaler_has_not_judged_are_refused_on_all_ranks() -> None:
    for message in run_ranks(_local_after_unscaling, 2):
        assert message.startswith("ConfigError: scaler.step(optimizer) has found gradients that are this rank's own"), message
        assert "Call scaler.unscale_(optimizer) after the last backward of the window" in message
