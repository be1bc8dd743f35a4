"""Guards gradients that a loop zeroes or replaces by itself, and those of parameters that not every rank uses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.harness import run_ranks
from tests.helpers.joined_batch import (
    STEPS,
    assert_equal_on_all_ranks,
    assert_trained_alike,
    joined_rows,
    net,
    plain_merged_loop,
    rows_of,
    sgd,
    weights,
)


def _zeroed_in_mid_window(rank: int, find_unused: bool) -> Tensor:
    model = net()
    strategy = fleet.DistributedStrategy(
        gradient_merge=True, gradient_merge_configs={"k_steps": 3}, find_unused_parameters=find_unused
    )
    if find_unused:
        model.append(nn.Linear(4, 4, dtype=torch.float64))  # never called: its bucket is not complete before the end
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for step in range(STEPS):
        model.zero_grad()
        x, y = rows_of(rank, step)
        optimizer.minimize(F.cross_entropy(model[:5](x), y))
    return weights(model[:5])


@pytest.mark.parametrize("find_unused", [False, True])
def test_model_zero_grad_inside_a_merge_window_loses_nothing(find_unused: bool) -> None:
    assert_trained_alike(run_ranks(_zeroed_in_mid_window, 2, find_unused), plain_merged_loop(3))


def _replaced(rank: int, clip: bool, spelling: str) -> Tensor:
    model = net()
    strategy = fleet.DistributedStrategy(clip_norm=clip, clip_norm_configs={"max_norm": 0.5}) if clip else None
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        optimizer.backward(F.cross_entropy(model(x), y))
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.sign() + 1.0
        model[0].bias.grad = None
        optimizer.step()
        if spelling == "zeroed":
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("spelling", ["zeroed", "not zeroed"])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_that_the_user_replaced_are_the_ones_applied(clip: bool, spelling: str) -> None:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = joined_rows(step)
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.sign() + 1.0
        model[0].bias.grad = None
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(run_ranks(_replaced, 2, clip, spelling), weights(model))


class Heads(nn.Module):
    """Heads that a batch may or may not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(8, 4, dtype=torch.float64)
        self.sometimes = nn.Linear(8, 4, dtype=torch.float64)
        self.once = nn.Linear(8, 4, dtype=torch.float64)
        self.never = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        out = self.always(x)
        if rank == 0:
            out = out + self.sometimes(x)
        if step == 0:
            out = out + self.once(x)
        return out


def _decaying(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def _partly_used(rank: int, spelling: str) -> tuple[list[str], Tensor, Tensor]:
    model = Heads()
    strategy = fleet.DistributedStrategy(find_unused_parameters=True, fuse_grad_size_in_MB=0.0003)
    model, optimizer = fleet.distribute(model, _decaying(model), strategy)
    once = torch.zeros(0)
    without: list[str] = []
    for step in range(STEPS):
        x, y = rows_of(rank, step)
        loss = F.cross_entropy(model(x, rank, step), y)
        if spelling == "bare":
            loss.backward()
        else:
            optimizer.backward(loss)
            without = [name for name, p in model.named_parameters() if p.grad is None]
        optimizer.step()
        if step == 0:
            once = weights(model.once).clone()
        optimizer.zero_grad()
    return without, weights(model), once


@pytest.mark.parametrize("spelling", ["optimizer.backward", "bare"])
def test_a_head_unused_on_one_rank_adds_zeros_and_one_unused_on_all_does_not_move(spelling: str) -> None:
    ranks = run_ranks(_partly_used, 2, spelling)
    model = Heads()
    at_start = weights(model.never).clone()
    optimizer = _decaying(model)
    for step in range(STEPS):
        losses = [F.cross_entropy(model(x, rank, step), y) for rank in range(2) for x, y in [rows_of(rank, step)]]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike([trained for _, trained, _ in ranks], weights(model))
    for without, trained, once in ranks:
        if spelling != "bare":
            assert without == ["once.weight", "once.bias", "never.weight", "never.bias"]
        _, _, used_once, never = trained.split(len(once))
        # Bit for bit: neither momentum nor weight decay moved them.
        torch.testing.assert_close(used_once, once, rtol=0, atol=0)
        torch.testing.assert_close(never, at_start, rtol=0, atol=0)


def _unused_and_zeroed(rank: int) -> tuple[Tensor, Tensor]:
    model = Heads()
    strategy = fleet.DistributedStrategy(find_unused_parameters=True)
    model, optimizer = fleet.distribute(model, _decaying(model), strategy)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        x, y = rows_of(rank, step)
        optimizer.backward(F.cross_entropy(model(x, rank, step), y))
        optimizer.step()
    return weights(model), weights(model.never)


def test_zeroing_to_zeros_gives_no_gradient_to_a_parameter_that_never_had_one() -> None:
    # torch zeroes the gradients there are, and makes none: weight decay must not find one.
    ranks = run_ranks(_unused_and_zeroed, 2)
    assert_equal_on_all_ranks([trained for trained, _ in ranks])
    torch.testing.assert_close(ranks[0][1], weights(Heads().never), rtol=0, atol=0)
