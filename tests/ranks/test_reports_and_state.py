"""Guards what an update reports, what `due` says of it, skipped updates, and the optimizer's state in torch's own form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from fleetx import fleet
from fleetx.engine.report import Report
from fleetx.engine.sidecar import ALARMS
from tests.helpers.harness import run_ranks
from tests.helpers.joined_batch import (
    STEPS,
    assert_equal_on_all_ranks,
    joined_rows,
    net,
    quiet_about_speed,
    rows_of,
    sgd,
    weights,
)
from tests.helpers.models import batch, mlp


def _adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def _saved_and_resumed(rank: int) -> tuple[Tensor, Tensor, dict[str, Any], dict[str, Any]]:
    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            x, y = rows_of(rank, step)
            optimizer.minimize(F.cross_entropy(model(x), y))

    first = net()
    first, optimizer = fleet.distribute(first, _adam(first))
    train(first, optimizer, range(3))
    model_state, optimizer_state = copy.deepcopy(first.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(first, optimizer, range(3, STEPS))

    second = net()
    inner = _adam(second)
    scheduler = StepLR(inner, step_size=1, gamma=1.0)
    second, resumed = fleet.distribute(second, inner)
    second.load_state_dict(model_state)
    resumed.load_state_dict(copy.deepcopy(optimizer_state))  # torch takes the tensors themselves, and trains them
    for step in range(3, STEPS):
        train(second, resumed, range(step, step + 1))
        scheduler.step()
    return weights(first), weights(second), model_state, optimizer_state


def test_optimizer_state_is_in_plain_torch_form_and_resumes_anywhere() -> None:
    ranks = run_ranks(_saved_and_resumed, 2)
    alone = net()
    optimizer = _adam(alone)
    alone.load_state_dict(ranks[0][2])
    optimizer.load_state_dict(ranks[0][3])  # saved by ours on two ranks, read by torch in one process
    for step in range(3, STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for through, resumed, _, _ in ranks:
        torch.testing.assert_close(resumed, through, rtol=0, atol=0)
    # 1e-9 and not 1e-12: Adam divides a gradient by its own size, and so enlarges the rounding of a tiny one.
    torch.testing.assert_close(ranks[0][0], weights(alone), rtol=0, atol=1e-9)
    assert set(ranks[0][3]) == {"state", "param_groups"}


def _reports(rank: int) -> list[tuple[bool, float, Report]]:
    model = net()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2}, desync_check_steps=0)
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    seen = []
    for step in range(4):
        x, y = rows_of(rank, step)
        loss = F.cross_entropy(model(x), y)
        due_before = optimizer.due
        report = optimizer.minimize(loss)
        seen.append((due_before, loss.item(), report))
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_a_report_says_what_the_micro_step_did(size: int) -> None:
    parameter_bytes = sum(p.nbytes for p in net().parameters())
    for seen in run_ranks(_reports, size):
        due_before, losses, reports = zip(*seen, strict=True)
        assert due_before == tuple(r.due for r in reports) == (False, True, False, True)
        assert [r.updated for r in reports] == [False, True, False, True]
        assert not any(r.skipped for r in reports)
        assert all(r.loss_scale == 1.0 and r.period is None for r in reports)
        assert [r.grad_norm is not None and r.grad_norm > 0 for r in reports] == [False, True, False, True]
        assert reports[1].loss == pytest.approx((losses[0] + losses[1]) / 2, abs=1e-12)
        assert reports[3].loss == pytest.approx((losses[2] + losses[3]) / 2, abs=1e-12)
        # Nothing travels inside a window. In the second (the first also compares the ranks' batches) the gradients do,
        # and with them one float32 for each alarm.
        assert reports[0].bytes_sent == reports[2].bytes_sent == 0
        assert reports[3].bytes_sent == round(2 * (size - 1) / size * (parameter_bytes + 4 * ALARMS))


def _due(rank: int) -> list[tuple[bool, bool, bool]]:
    model = net()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    seen = []
    for step in range(6):
        before = optimizer.due
        x, y = rows_of(rank, step)
        optimizer.backward(F.cross_entropy(model(x), y))
        after = optimizer.due  # `if optimizer.due: clip` stands here
        seen.append((before, after, optimizer.step().due))
        optimizer.zero_grad()
    return seen


def test_due_says_the_same_before_and_after_the_backward_it_speaks_of() -> None:
    no, yes = (False,) * 3, (True,) * 3
    assert run_ranks(_due, 2) == [[no, no, yes, no, no, yes]] * 2


def _overflowed(rank: int) -> tuple[list[tuple[bool, bool, bool, float]], list[Tensor]]:
    quiet_about_speed()
    model = mlp()
    settings = {"dtype": "float16", "init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1}
    strategy = fleet.DistributedStrategy(amp=True, amp_configs=settings)
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    reports, states = [], []
    for step in range(3):
        x, y = batch(step * 2 + rank)
        loss = F.cross_entropy(model(x), y)
        if step == 1 and rank == 1:
            loss = loss * float("inf")  # on one rank alone; all must skip
        report = optimizer.minimize(loss)
        reports.append((report.due, report.updated, report.skipped, report.loss_scale))
        states.append(weights(model).clone())
    return reports, states


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    ranks = run_ranks(_overflowed, 2)
    for reports, states in ranks:
        assert reports == [(True, True, False, 1024.0), (True, False, True, 1024.0), (True, True, False, 512.0)]
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
        assert not torch.equal(states[2], states[1])
    assert_equal_on_all_ranks([states for _, states in ranks])
