"""Guards a GradScaler that the loop drives by hand: it skips on all ranks or on none, and parts see unscaled gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet
from tests.helpers.ddp_loops import STEPS, small_buckets
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, flat_state, mlp


def _scaled(rank: int, api: str, rebound: bool, unscales: bool, fused: bool) -> tuple[Tensor, list[float], int]:
    torch.manual_seed(0)
    inner = mlp()
    given: Any = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9, fused=fused)
    model: Any = inner
    optimizer = given
    if api == "fleetx":
        model, returned = fleet.distribute(inner, given, small_buckets())
        optimizer = returned if rebound else given
    else:
        model = DistributedDataParallel(inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales = []
    for step in range(STEPS):
        x, y = batch(step * 2 + rank)
        loss = F.cross_entropy(model(x), y)
        if step == 2 and rank == 1:
            loss = loss * float("inf")  # on one rank alone
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return flat_state(inner), scales, returned.skipped if api == "fleetx" else 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("rebound", [False, True])
def test_a_grad_scaler_by_hand_skips_on_all_ranks_or_on_none(rebound: bool, unscales: bool, fused: bool) -> None:
    mine, theirs = run_ranks(_scaled, 2, "fleetx", rebound, unscales, fused), run_ranks(_scaled, 2, "ddp", True, unscales, fused)
    torch.testing.assert_close(mine[0][0], mine[1][0], rtol=0, atol=0)
    torch.testing.assert_close(mine[0][0], theirs[0][0], rtol=1e-6, atol=1e-6)
    assert mine[0][1] == mine[1][1] == theirs[0][1]
    assert 512.0 in mine[0][1], "or nothing was skipped"


def _scaler_beside(rank: int, **parts: Any) -> str:
    warnings.filterwarnings("ignore", message="amp:")
    model = mlp()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), small_buckets(**parts))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = batch(rank)

    def train() -> None:
        for _ in range(2):
            loss = scaler.scale(F.cross_entropy(model(x), y))
            optimizer.backward(loss) if "amp" in parts else loss.backward()
            scaler.step(optimizer)

    return raised(train)


def _scalers(rank: int) -> list[str]:
    return [
        _scaler_beside(rank, amp=True, amp_configs={"dtype": "float16"}),
        _scaler_beside(rank, gradient_merge=True, gradient_merge_configs={"k_steps": 2}),
        _scaler_beside(rank, powersgd=True, powersgd_configs={"begin_step": 0, "rank": 1, "min_compression": 1.0}),
    ]


def test_a_grad_scaler_is_refused_by_name_beside_parts_that_need_true_gradients() -> None:
    for messages in run_ranks(_scalers, 2):
        for message, part in zip(messages, ("strategy.amp in float16", "strategy.gradient_merge", "`reduce`"), strict=True):
            assert message.startswith("ConfigError: a GradScaler by hand beside") and part in message, message


def _scaled_with_parts(rank: int, part: str) -> Tensor:
    torch.manual_seed(0)
    model = mlp()
    given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    fleet.distribute(model, given, small_buckets(**{part: True}))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        x, y = batch(step * 2 + rank)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(given)
        scaler.update()
        given.zero_grad()
    return flat_state(model)


def _with_part(rank: int, part: str) -> Tensor:
    torch.manual_seed(0)
    model = mlp()
    model, optimizer = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), small_buckets(**{part: True})
    )
    for step in range(STEPS):
        x, y = batch(step * 2 + rank)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return flat_state(model)


@pytest.mark.parametrize("part", ["clip_norm", "lars"])
def test_a_scaler_on_the_given_fused_optimizer_is_undone_before_parts_see_gradients(part: str) -> None:
    mine, wanted = run_ranks(_scaled_with_parts, 2, part), run_ranks(_with_part, 2, part)
    torch.testing.assert_close(mine[0], wanted[0], rtol=1e-6, atol=1e-6)
