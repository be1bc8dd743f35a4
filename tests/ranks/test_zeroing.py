"""Guards every way to zero gradients, loops that never do, and what a backward that failed leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.ddp_loops import (
    STEPS,
    assert_as_under_ddp,
    ddp,
    loss_of,
    make_pair,
    plain_loop,
    rows,
    sgd,
    small_buckets,
    weights,
)
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import mlp


def _never_zeroed(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()


def test_a_loop_that_never_zeroes_accumulates_as_in_torch() -> None:
    assert_as_under_ddp(_never_zeroed)


ZEROING: dict[str, Callable[[nn.Module, Any], None]] = {
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "p.grad.zero_()": lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None] and None,
    "p.grad = None": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()] and None,
    "optimizer.zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


def _zeroed(rank: int, how: str, period: int) -> Tensor:
    model, optimizer = make_pair(gradient_merge=period > 1, gradient_merge_configs={"k_steps": period})
    for step in range(STEPS):
        ZEROING[how](model, optimizer)
        loss_of(model, rank, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    return weights(model)


def _merged_by_hand(rank: int, period: int) -> Tensor:
    model = mlp(torch.float64)
    optimizer = sgd(model)
    for first in range(0, STEPS, period):
        losses = [loss_of(model, r, step) for step in range(first, first + period) for r in (0, 1)]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("how", ZEROING)
def test_every_way_to_zero_works_and_inside_a_merge_window_clipping_and_zeroing_find_nothing(how: str, period: int) -> None:
    mine, reference = run_ranks(_zeroed, 2, how, period), run_ranks(_merged_by_hand, 1, period)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], reference[0], rtol=1e-12, atol=1e-12)


def _failed_backward(rank: int) -> Tensor:
    """A batch that fails in backward on every rank, is skipped, and leaves nothing behind."""
    model, optimizer = make_pair()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            raise RuntimeError("out of memory, say")

    for step in range(STEPS):
        if step == 3:
            x, y = rows(rank, 99)
            with pytest.raises(RuntimeError, match="out of memory, say"):
                F.cross_entropy(model[2:](Fails.apply(model[:2](x))), y).backward()
            model.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_a_backward_that_failed_leaves_nothing_behind_once_gradients_are_zeroed() -> None:
    mine, reference = run_ranks(_failed_backward, 2), run_ranks(ddp, 2, plain_loop)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], reference[0][0], rtol=1e-12, atol=1e-12)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("out of memory, say")


def _flushed_after_failure(rank: int) -> str:
    model, optimizer = make_pair(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    loss_of(model, rank, 0).backward()
    optimizer.step()
    x, y = rows(rank, 1)
    assert "out of memory" in raised(F.cross_entropy(model[2:](FailsInBackward.apply(model[:2](x))), y).backward)
    return raised(optimizer.flush)


def test_a_flush_after_a_failed_backward_is_refused() -> None:
    for message in run_ranks(_flushed_after_failure, 2):
        assert message.startswith("FleetError: a backward failed in this window"), message


def _never_zeroed_beside_another(rank: int, local: bool) -> Tensor:
    """With a second pair alive nothing is counted during backward; gradients of earlier updates still add up."""
    other = mlp(torch.float64)
    other, _other_optimizer = fleet.distribute(other, sgd(other), small_buckets())
    model, optimizer = make_pair()
    for step in range(STEPS):
        with fleet.no_sync() if local and step == 0 else contextlib.nullcontext():
            loss_of(model, rank, step).backward()
        optimizer.step()
        if step == 2:
            optimizer.zero_grad(set_to_none=False)
    return weights(model)


def _never_zeroed_under_ddp(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()
        if step == 2:
            optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("local", [False, True])
def test_gradients_that_were_never_zeroed_add_up_beside_another_pair_too(local: bool) -> None:
    mine, theirs = run_ranks(_never_zeroed_beside_another, 2, local), run_ranks(ddp, 2, _never_zeroed_under_ddp)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], theirs[0][0], rtol=1e-12, atol=1e-12)


def _half_on_top_of_old(rank: int, local: bool) -> Tensor:
    """A backward that reaches only half of the model, on top of the last update's gradients: local, or beside another pair."""
    _other = make_pair()
    model, optimizer = make_pair()
    loss_of(model, rank, 0).backward()
    optimizer.step()
    with fleet.no_sync() if local else contextlib.nullcontext():
        model[2:](torch.full((2, 16), 1.0 + rank, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return weights(model)


def _old_and_half_alone() -> Tensor:
    model = mlp(torch.float64)
    optimizer = sgd(model)
    ((loss_of(model, 0, 0) + loss_of(model, 1, 0)) / 2).backward()
    optimizer.step()
    sum(model[2:](torch.full((2, 16), 1.0 + rank, dtype=torch.float64)).sum() / 2 for rank in range(2)).backward()
    optimizer.step()
    return weights(model)


@pytest.mark.parametrize("local", [False, True])
def test_gradients_on_top_of_the_last_updates_are_what_torch_would_apply(local: bool) -> None:
    mine = run_ranks(_half_on_top_of_old, 2, local)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], _old_and_half_alone(), rtol=1e-12, atol=1e-12)
