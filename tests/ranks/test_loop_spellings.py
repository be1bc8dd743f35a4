"""Guards every spelling of a micro-step: each ends where one process on the joined batch ends, also when a window is flushed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.harness import run_ranks
from tests.helpers.joined_batch import STEPS, assert_trained_alike, joined_rows, net, plain_merged_loop, rows_of, sgd, weights


def _spelled(rank: int, spelling: str, period: int) -> Tensor:
    model = net()
    strategy = fleet.DistributedStrategy(gradient_merge=period > 1, gradient_merge_configs={"k_steps": period})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        loss = F.cross_entropy(model(x), y)
        if spelling == "minimize":
            optimizer.minimize(loss)
        elif spelling == "three calls":
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        elif spelling == "zero first":
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.step()
        elif spelling == "bare":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            assert spelling == "bare, zero first, to zeros"
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("spelling", ["minimize", "three calls", "zero first", "bare", "bare, zero first, to zeros"])
def test_every_spelling_of_a_step_equals_one_process_on_the_joined_batch(spelling: str, period: int) -> None:
    assert_trained_alike(run_ranks(_spelled, 2, spelling, period), plain_merged_loop(period))


def test_a_plain_python_process_trains_exactly_as_torch_alone() -> None:
    script = """
        import torch
        from tests.helpers.models import batch, mlp
        from torch.nn import functional as F
        from fleetx import fleet

        fleet.init()
        ours, alone = mlp(), mlp()
        assert (fleet.worker_index(), fleet.worker_num()) == (0, 1)
        ours, optimizer = fleet.distribute(ours, torch.optim.Adam(ours.parameters()))
        reference = torch.optim.Adam(alone.parameters())
        for step in range(4):
            x, y = batch(step)
            report = optimizer.minimize(F.cross_entropy(ours(x), y))
            assert (report.due, report.updated, report.bytes_sent) == (True, True, 0)
            F.cross_entropy(alone(x), y).backward()
            reference.step()
            reference.zero_grad()
        for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
            assert torch.equal(a, b)
        print("the same bits")
    """
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_", "PMI_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "the same bits" in done.stdout


def _flushed(rank: int, spelling: str) -> tuple[Tensor, list[tuple[bool, bool]]]:
    model = net()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    seen = []
    for step in range(7):  # one full window, then three of four
        x, y = rows_of(rank, step)
        loss = F.cross_entropy(model(x), y)
        if spelling == "bare":
            loss.backward()
            report = optimizer.step()
            optimizer.zero_grad()
        else:
            report = optimizer.minimize(loss)
        seen.append((report.due, report.updated))
    for _ in range(2):  # a second flush finds nothing to do
        report = optimizer.flush()
        seen.append((report.due, report.updated))
    x, y = rows_of(rank, 7)
    seen.append((optimizer.due, optimizer.minimize(F.cross_entropy(model(x), y)).due))  # the next window starts at its beginning
    return weights(model), seen


@pytest.mark.parametrize("spelling", ["minimize", "bare"])
def test_flush_closes_a_window_with_the_mean_of_what_it_has(spelling: str) -> None:
    ranks = run_ranks(_flushed, 2, spelling)
    model = net()
    optimizer = sgd(model)
    for window in (range(4), range(4, 7)):
        losses = [F.cross_entropy(model(x), y) for x, y in map(joined_rows, window)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike([trained for trained, _ in ranks], weights(model))
    no, yes = (False, False), (True, True)
    for _, seen in ranks:
        assert seen == [no, no, no, yes, no, no, no, yes, no, no]


def _large_gradients(rank: int, loop: str) -> Tensor:
    """A gradient of a mebibyte is made true while it is copied, once its window is about to close: not by an earlier factor."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(8, 2**14, dtype=torch.float64)
    merged = 1 if loop == "a bare backward after ours" else 3
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": merged})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    losses = (model(rows_of(rank, step)[0]).square().mean() for step in range(2))
    optimizer.minimize(next(losses))
    if loop == "flushed after one of three":
        optimizer.flush()
        optimizer.minimize(next(losses))
        optimizer.flush()
    else:
        next(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("loop", ["a bare backward after ours", "flushed after one of three"])
def test_large_gradients_are_true_ones_however_a_window_closes(loop: str) -> None:
    ranks = run_ranks(_large_gradients, 2, loop)
    torch.manual_seed(0)
    model = nn.Linear(8, 2**14, dtype=torch.float64)
    optimizer = sgd(model)
    for step in range(2):
        model(joined_rows(step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(ranks, weights(model))


def _two_calls(rank: int, order: str) -> Tensor:
    model = net()
    if rank == 1:
        with torch.no_grad():
            model[0].weight.fill_(7.0)  # type: ignore[operator]
    other = net()  # a second model that waits: parameters decide who belongs to whom
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    fleet.distributed_model(other)
    if order == "model first":
        same = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(sgd(model), strategy)
    else:
        optimizer = fleet.distributed_optimizer(sgd(model), strategy)
        same = fleet.distributed_model(model)
    assert same is model
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return weights(model)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_the_two_call_spelling_works_in_both_orders(order: str) -> None:
    assert_trained_alike(run_ranks(_two_calls, 2, order), plain_merged_loop(3))
