"""Guards gradients after a bare backward: they are the mean of all ranks when it ends; they may be clipped, edited, summed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet
from tests.helpers.ddp_loops import STEPS, assert_as_under_ddp, ddp, loss_of, make_pair, plain_loop, sgd, small_buckets, weights
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import mlp


def _clipped(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    norms = []
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_clipping_after_a_bare_backward_clips_the_mean_of_all_ranks() -> None:
    mine = assert_as_under_ddp(_clipped)
    assert max(mine[0][1]) > 0.2, "or nothing was clipped"
    assert mine[0][1] == mine[1][1]


def _looked_at_and_edited(model: nn.Module, optimizer: Any, rank: int) -> list[Tensor]:
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for p in model.parameters():
            p.grad = p.grad.sign() * 0.01 if step % 2 else p.grad.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step()
    return seen


def test_gradients_looked_at_and_edited_between_backward_and_step_are_the_mean() -> None:
    assert_as_under_ddp(_looked_at_and_edited)


def _repaired(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    norms = []
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        (loss * float("nan") if step == 2 and rank == 1 else loss).backward()
        for i, p in enumerate(model.parameters()):
            if i % 2:
                p.grad = torch.nan_to_num(p.grad)  # type: ignore[arg-type]
            else:
                torch.nan_to_num_(p.grad)  # type: ignore[arg-type]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_gradients_that_the_user_has_made_finite_again_are_applied() -> None:
    mine = assert_as_under_ddp(_repaired)
    assert mine[0][1][2] == 0.0, "or nothing was repaired"


def _accumulated_by_hand(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        (loss_of(model, rank, step) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_several_backwards_before_one_step_add_up() -> None:
    assert_as_under_ddp(_accumulated_by_hand)


def _without_sync(model: nn.Module, optimizer: Any, rank: int) -> list[bool]:
    no_sync = model.no_sync if isinstance(model, DistributedDataParallel) else fleet.no_sync
    equal = []
    for step in range(STEPS):
        with no_sync() if step % 3 < 2 else contextlib.nullcontext():
            (loss_of(model, rank, step) / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        else:
            grad = next(model.parameters()).grad
            assert grad is not None
            everywhere = fleet.util.all_gather(grad.clone())
            equal.append(torch.equal(everywhere[0], everywhere[1]))
    return equal


def test_no_sync_leaves_gradients_local_until_the_next_backward_outside() -> None:
    mine = assert_as_under_ddp(_without_sync)
    assert mine[0][1] == [False] * 4


def _only_without_sync(rank: int) -> Tensor:
    """A short last window: under DDP its update would be each rank's own."""
    model, optimizer = make_pair()
    for step in range(STEPS):
        with fleet.no_sync():
            loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_a_step_after_local_gradients_alone_reduces_them() -> None:
    mine, reference = run_ranks(_only_without_sync, 2), run_ranks(ddp, 2, plain_loop)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], reference[0][0], rtol=1e-12, atol=1e-12)


def _made_by_hand(rank: int) -> Tensor:
    model, optimizer = make_pair()
    for step in range(STEPS):
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss_of(model, rank, step), model.parameters()), strict=True):
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_gradients_put_in_place_by_autograd_grad_are_reduced_in_step() -> None:
    mine, reference = run_ranks(_made_by_hand, 2), run_ranks(ddp, 2, plain_loop)
    torch.testing.assert_close(mine[0], reference[0][0], rtol=1e-12, atol=1e-12)


def _two_backwards_a_step(rank: int, avg: bool, local: bool) -> Tensor:
    """As a GAN's discriminator does, merged: two backwards for each step(), clipping before it."""
    model, optimizer = make_pair(gradient_merge=True, gradient_merge_configs={"k_steps": 3, "avg": avg})
    for step in range(STEPS):
        optimizer.zero_grad()
        with fleet.no_sync() if local else contextlib.nullcontext():
            loss_of(model, rank, step).backward()
        loss_of(model, rank, 100 + step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("avg", [False, True])
def test_two_backwards_a_step_add_up_under_gradient_merge(avg: bool, local: bool) -> None:
    mine = run_ranks(_two_backwards_a_step, 2, avg, local)
    model = mlp(torch.float64)
    optimizer = sgd(model)
    for first in range(0, STEPS, 3):
        losses = [loss_of(model, rank, n + step) for step in range(first, first + 3) for n in (0, 100) for rank in (0, 1)]
        (torch.stack(losses).sum() / (6 if avg else 2)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], weights(model), rtol=1e-12, atol=1e-12)


def _twice_compressed(rank: int, part: str) -> tuple[list[str], list[Tensor]]:
    quantised = {"bits": 8, "block": 16}
    settings = {
        "quantized_allreduce": quantised,
        "powersgd": {"begin_step": 0, "rank": 2, "min_compression": 1.0},
        "dgc": {"min_numel": 16, "sparsity": [0.5]},
    }
    model = mlp(torch.float64)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fleet.distribute(model, inner, small_buckets(**{part: True, f"{part}_configs": settings[part]}))
    told, states = [], []
    for step in range(12):
        with fleet.no_sync() if step % 2 else contextlib.nullcontext():
            loss_of(model, rank, 0).backward()
        told.append(raised(loss_of(model, rank, 1).backward))
        optimizer.step()
        optimizer.zero_grad()
        states.append(weights(model))
    return told, states


@pytest.mark.parametrize("part", ["powersgd", "quantized_allreduce"])
def test_two_backwards_an_update_add_up_under_compressors_with_error_feedback(part: str) -> None:
    ranks = run_ranks(_twice_compressed, 2, part)
    torch.testing.assert_close(ranks[0][1], ranks[1][1], rtol=0, atol=0)
    assert set(ranks[0][0]) == {"nothing raised"}
    dense = mlp(torch.float64)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.05, momentum=0.9)
    before = weights(dense)
    for _ in range(12):
        sum(loss_of(dense, rank, n) for rank in (0, 1) for n in (0, 1)).div(2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    # Error feedback: the way that training has gone is that of dense training, up to what is still to be sent.
    moved, wanted = ranks[0][1][-1] - before, weights(dense) - before
    assert float((moved - wanted).norm() / wanted.norm()) < 0.3


def test_two_backwards_an_update_are_refused_under_dgc() -> None:
    for told, _ in run_ranks(_twice_compressed, 2, "dgc"):
        assert told[0].startswith("ConfigError: a second backward before optimizer.step() under strategy.dgc"), told[0]
        assert "with fleet.no_sync():" in told[0] and told[1] == "nothing raised"


def _looks_at_curvature(rank: int, **parts: Any) -> tuple[Tensor, list[bool]]:
    """autograd.grad of another loss between backward and step: it calls the hooks of parameters, and adds nothing."""
    model, optimizer = make_pair(**parts)
    seen = []
    for step in range(4):
        loss_of(model, rank, step).backward()
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        torch.autograd.grad(loss_of(model, rank, 50), list(model.parameters()))
        both = zip(before, (p.grad for p in model.parameters()), strict=True)
        seen.append(all(old is now is None or (old is not None and torch.equal(old, now)) for old, now in both))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), seen


def _curvature(rank: int) -> list[tuple[Tensor, list[bool], Tensor]]:
    found = []
    for parts in ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}, {"powersgd": True}):
        looked, seen = _looks_at_curvature(rank, **parts)
        model, optimizer = make_pair(**parts)
        for step in range(4):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((looked, seen, weights(model)))
    return found


def test_a_gradient_taken_by_autograd_grad_between_backward_and_step_changes_nothing() -> None:
    for rank in run_ranks(_curvature, 2):
        for looked, seen, plain in rank:
            assert all(seen)
            torch.testing.assert_close(looked, plain, rtol=0, atol=0)


def _halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _hooked_later(model: nn.Module, optimizer: Any, rank: int) -> None:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    plain_loop(model, optimizer, rank)


def test_a_hook_registered_after_distribute_changes_gradients_before_they_are_sent() -> None:
    assert_as_under_ddp(_hooked_later)
