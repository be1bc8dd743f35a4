"""Guards the loops that people write before they have read a page of ours: each trains as under DDP, or is told why not."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from fleetx import fleet
from fleetx.dist import comm
from fleetx.errors import FleetWarning
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, flat_state, mlp

STEPS = 6
Loop = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def rows(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(step * 2 + rank, dtype=torch.float64)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = rows(rank, step)
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def small_buckets(**parts: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(fuse_grad_size_in_MB=0.0005, **parts)


def ours(rank: int, loop: Loop, **parts: Any) -> tuple[Tensor, Any]:
    model, optimizer = _pair(**parts)
    seen = loop(model, optimizer, rank)
    return weights(model), seen


def _pair(**parts: Any) -> tuple[nn.Module, Any]:
    model = mlp(torch.float64)
    return fleet.distribute(model, sgd(model), small_buckets(**parts))


def ddp(rank: int, loop: Loop) -> tuple[Tensor, Any]:
    model = mlp(torch.float64)
    wrapped = DistributedDataParallel(model)
    seen = loop(wrapped, sgd(model), rank)
    return weights(model), seen


def assert_as_under_ddp(loop: Loop, *, tolerance: float = 1e-12) -> list[Any]:
    """The same bits on both ranks, and DDP's numbers."""
    mine, theirs = run_ranks(ours, 2, loop), run_ranks(ddp, 2, loop)
    torch.testing.assert_close(mine[0][0], mine[1][0], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], theirs[0], rtol=tolerance, atol=tolerance)
    return mine


# --- gradients are true when backward ends --------------------------------------------------------------------------


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


def _never_zeroed(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()


def test_a_loop_that_never_zeroes_accumulates_as_in_torch() -> None:
    assert_as_under_ddp(_never_zeroed)


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
    model, optimizer = _pair()
    for step in range(STEPS):
        with fleet.no_sync():
            loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_a_step_after_local_gradients_alone_reduces_them() -> None:
    mine, reference = run_ranks(_only_without_sync, 2), run_ranks(ddp, 2, _plain)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], reference[0][0], rtol=1e-12, atol=1e-12)


def _plain(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def _made_by_hand(rank: int) -> Tensor:
    model, optimizer = _pair()
    for step in range(STEPS):
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss_of(model, rank, step), model.parameters()), strict=True):
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_gradients_put_in_place_by_autograd_grad_are_reduced_in_step() -> None:
    mine, reference = run_ranks(_made_by_hand, 2), run_ranks(ddp, 2, _plain)
    torch.testing.assert_close(mine[0], reference[0][0], rtol=1e-12, atol=1e-12)


def _two_backwards_a_step(rank: int, avg: bool, local: bool) -> Tensor:
    """As a GAN's discriminator does, merged: two backwards for each step(), clipping before it."""
    model, optimizer = _pair(gradient_merge=True, gradient_merge_configs={"k_steps": 3, "avg": avg})
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


# --- zeroing --------------------------------------------------------------------------------------------------------

ZEROING: dict[str, Callable[[nn.Module, Any], None]] = {
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "p.grad.zero_()": lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None] and None,
    "p.grad = None": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()] and None,
    "optimizer.zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


def _zeroed(rank: int, how: str, period: int) -> Tensor:
    model, optimizer = _pair(gradient_merge=period > 1, gradient_merge_configs={"k_steps": period})
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


# --- GradScaler by hand ---------------------------------------------------------------------------------------------


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


# --- the optimizer that was given -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "Adam, fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
}


def _not_rebound(rank: int, name: str, scheduler_made: str) -> tuple[Tensor, float]:
    model = mlp(torch.float64)
    optimizer = OPTIMIZERS[name](model)
    scheduler = StepLR(optimizer, 2, 0.5) if scheduler_made == "before" else None
    fleet.distribute(model, optimizer, small_buckets())
    scheduler = scheduler or StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        scheduler.step()
    return weights(model), optimizer.param_groups[0]["lr"]


def _joined(name: str) -> tuple[Tensor, float]:
    model = mlp(torch.float64)
    optimizer = OPTIMIZERS[name](model)
    scheduler = StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        ((loss_of(model, 0, step) + loss_of(model, 1, step)) / 2).backward()
        optimizer.step()
        scheduler.step()
    return weights(model), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("scheduler_made", ["before", "after"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_script_that_ignores_what_distribute_returns_trains_all_the_same(name: str, scheduler_made: str) -> None:
    mine = run_ranks(_not_rebound, 2, name, scheduler_made)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], _joined(name), rtol=1e-10, atol=1e-10)


def _drifting(rank: int) -> str:
    """A step that goes past everything: the class's own, called by hand."""
    model, optimizer = _pair()

    def train() -> None:
        for step in range(3):
            loss_of(model, rank, step).backward()
            with torch.no_grad():
                model[0].weight.add_(0.1 * rank)
            optimizer.step()
            optimizer.zero_grad()

    return raised(train)


def test_ranks_that_drift_apart_are_seen_after_the_first_update() -> None:
    for message in run_ranks(_drifting, 2):
        assert message.startswith("FleetError: after update 1 the ranks no longer hold the same model"), message


def _skipping_alone(rank: int) -> str:
    model, optimizer = _pair(desync_check_steps=0)

    def train() -> None:
        for step in range(4):
            loss_of(model, rank, step).backward()
            if not (rank == 1 and step == 1):
                optimizer.step()
            for p in model.parameters():
                p.grad = None

    return raised(train)


def test_a_rank_that_skips_a_step_alone_is_named_with_its_place() -> None:
    for message in run_ranks(_skipping_alone, 2):
        assert message.startswith("FleetError: the ranks have reduced different backwards together"), message
        assert "rank 0: backward 1 of update 3" in message and "rank 1: backward 2 of update 2" in message


def _dropping_alone(rank: int, which: str) -> str:
    model, optimizer = _pair(desync_check_steps=0)

    def train() -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if which == "backward" and rank == 1 and step == 1:
                loss_of(model, rank, step).backward()
            if not (which == "step" and rank == 1 and step == 1):
                optimizer.step()

    return raised(train)


@pytest.mark.parametrize(
    ("which", "first", "second"),
    [
        ("step", "rank 0: backward 1 of update 3; ", "rank 1: backward 1 of update 3, 1 dropped by zero_grad() so far"),
        ("backward", "rank 0: backward 1 of update 3; ", "rank 1: backward 2 of update 2"),
    ],
)
def test_a_rank_that_drops_a_step_or_makes_one_more_backward_is_named_also_by_zero_grad(
    which: str, first: str, second: str
) -> None:
    for message in run_ranks(_dropping_alone, 2, which):
        assert message.startswith("FleetError: the ranks have reduced different backwards together"), message
        assert first in message and second in message, message


# --- distribute once more -------------------------------------------------------------------------------------------


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


# --- parameters that join later -------------------------------------------------------------------------------------


def _joining(rank: int, how: str, spelling: str) -> Tensor:
    model = mlp(torch.float64)
    for p in model[2].parameters():
        p.requires_grad_(False)
    joins = list(model[2].parameters())
    held = list(model.parameters()) if how == "unfrozen" else [p for p in model.parameters() if p.requires_grad]
    given = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    model, optimizer = fleet.distribute(model, given, small_buckets())
    for step in range(STEPS):
        if step == 2:
            for p in joins:
                p.requires_grad_(True)
            if how == "added":
                optimizer.add_param_group({"params": joins, "lr": 0.05})
            if how == "added to the given one":
                given.add_param_group({"params": joins, "lr": 0.05})
        if spelling == "bare":
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.minimize(loss_of(model, rank, step))
    return weights(model)


def _joined_alone(how: str) -> Tensor:
    model = mlp(torch.float64)
    for p in model[2].parameters():
        p.requires_grad_(False)
    joins = list(model[2].parameters())
    held = list(model.parameters()) if how == "unfrozen" else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step == 2:
            for p in joins:
                p.requires_grad_(True)
            if how != "unfrozen":
                optimizer.add_param_group({"params": joins, "lr": 0.05})
        ((loss_of(model, 0, step) + loss_of(model, 1, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("spelling", ["bare", "minimize"])
@pytest.mark.parametrize("how", ["unfrozen", "added", "added to the given one"])
def test_parameters_unfrozen_or_added_in_mid_training_train_from_then_on(how: str, spelling: str) -> None:
    mine = run_ranks(_joining, 2, how, spelling)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], _joined_alone(how), rtol=1e-12, atol=1e-12)


def _replace(model: nn.Module, optimizer: Any, how: str) -> None:
    """As pruning and Gaussian splatting do: a tensor of another shape or values takes a parameter's place, with its state."""
    old = model[2].weight  # type: ignore[index]
    new = nn.Parameter(old.detach() * 2)
    group = next(group for group in optimizer.param_groups if any(p is old for p in group["params"]))
    optimizer.state[new] = {key: value * 2 for key, value in optimizer.state.pop(old, {}).items() if torch.is_tensor(value)}
    if how == "a new group":
        optimizer.param_groups[:] = [other for other in optimizer.param_groups if other is not group]
        optimizer.add_param_group({**group, "params": [new if p is old else p for p in group["params"]]})
    else:
        group["params"] = [new if p is old else p for p in group["params"]]
    model[2].weight = new  # type: ignore[index]


def _replaced(rank: int, how: str, distributed: bool) -> Tensor:
    model = mlp(torch.float64)
    held = [{"params": [p]} for p in model.parameters()]
    optimizer: Any = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    if distributed:
        model, optimizer = fleet.distribute(model, optimizer, small_buckets(find_unused_parameters=how == "unused"))
    for step in range(STEPS):
        if step == 2 and how != "between backward and step":
            _replace(model, optimizer, how)
        for r in [rank] if distributed else [0, 1]:
            loss = loss_of(model, r, step) / (1 if distributed else 2)
            optimizer.backward(loss) if how == "optimizer.backward" and distributed else loss.backward()
        if step == 2 and how == "between backward and step":
            _replace(model, optimizer, how)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("how", ["in its group", "a new group", "unused", "optimizer.backward", "between backward and step"])
def test_a_parameter_replaced_in_model_and_optimizer_trains_from_then_on(how: str) -> None:
    mine, alone = run_ranks(_replaced, 2, how, True), run_ranks(_replaced, 1, how, False)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], alone[0], rtol=1e-12, atol=1e-12)


def _replaced_otherwise(rank: int) -> list[str]:
    told = []
    for change in ("assigned", "parametrized"):
        model, optimizer = _pair()
        if change == "assigned":
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())  # type: ignore[index]
        else:
            nn.utils.parametrizations.weight_norm(model[2])  # type: ignore[index]
        loss_of(model, rank, 0).backward()
        told.append(raised(optimizer.step))
    return told


def test_a_parameter_replaced_in_the_model_alone_and_one_that_was_parametrized_are_told_apart() -> None:
    for assigned, parametrized in run_ranks(_replaced_otherwise, 2):
        assert assigned.startswith("ConfigError: `2.weight` of the model is no longer the tensor that the optimizer holds"), (
            assigned
        )
        assert parametrized.startswith("ConfigError: `2.weight` is no parameter of the model any more"), parametrized
        assert "weight_norm" in parametrized and "call fleet.distribute(...)" in parametrized


def _frozen_later(rank: int) -> Tensor:
    model, optimizer = _pair()
    for step in range(STEPS):
        if step == 2:
            for p in model[2].parameters():
                p.requires_grad_(False)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_parameters_frozen_in_mid_training_stay_as_they_are_without_decay_or_momentum() -> None:
    mine = run_ranks(_frozen_later, 2)
    model = mlp(torch.float64)
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 2:
            for p in model[2].parameters():
                p.requires_grad_(False)
        ((loss_of(model, 0, step) + loss_of(model, 1, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], weights(model), rtol=1e-12, atol=1e-12)


# --- optimizers with ideas of their own -----------------------------------------------------------------------------


class TwoStep(torch.optim.Optimizer):
    """Sharpness-aware: climbs first, takes the gradient there, and steps from where it was."""

    def __init__(self, params: Any, base: Any, **settings: Any) -> None:
        super().__init__(params, {"rho": 0.05, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
                p.add_(p.grad, alpha=float(0.05 / norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])
        self.base.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()

    def train(self) -> str:
        return "a method of its own"


def _sam(rank: int, api: str, spelling: str) -> tuple[Tensor, str]:
    model: Any = mlp(torch.float64)
    inner = model
    optimizer: Any = TwoStep(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    if api == "fleetx":
        model, optimizer = fleet.distribute(model, optimizer, small_buckets())
    else:
        model = DistributedDataParallel(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        if spelling == "two calls":
            optimizer.first_step(zero_grad=True)
            loss_of(model, rank, step).backward()
            optimizer.second_step(zero_grad=True)
        else:
            optimizer.step(lambda step=step: loss_of(model, rank, step).backward())
            optimizer.zero_grad()
    return weights(inner), optimizer.train()


@pytest.mark.parametrize("spelling", ["two calls", "a closure"])
def test_methods_of_the_optimizers_own_pass_through_and_train_as_under_ddp(spelling: str) -> None:
    mine, theirs = run_ranks(_sam, 2, "fleetx", spelling), run_ranks(_sam, 2, "ddp", spelling)
    torch.testing.assert_close(mine[0][0], mine[1][0], rtol=0, atol=0)
    torch.testing.assert_close(mine[0][0], theirs[0][0], rtol=1e-12, atol=1e-12)
    assert mine[0][1] == "a method of its own"


def _sam_beside(rank: int) -> list[str]:
    messages = []
    for parts in ({"clip_norm": True}, {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}, {"localsgd": True}):
        model = mlp(torch.float64)
        given = TwoStep(model.parameters(), torch.optim.SGD, lr=0.1)
        model, optimizer = fleet.distribute(model, given, small_buckets(**parts))
        messages.append(raised(lambda optimizer=optimizer: optimizer.first_step()))  # type: ignore[misc]
    return messages


def test_a_method_that_updates_is_refused_by_name_where_it_would_go_past_a_part() -> None:
    for messages in run_ranks(_sam_beside, 2):
        for message, part in zip(messages, ("clip_norm", "gradient_merge", "localsgd"), strict=True):
            assert message.startswith("ConfigError: TwoStep.first_step updates the weights by itself"), message
            assert f"strategy.{part}" in message


def _with_closure(model: nn.Module, optimizer: Any, rank: int) -> list[float]:
    values = []
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            return loss.detach()

        values.append(float(optimizer.step(closure)))
    return values


def test_a_closure_is_run_once_and_its_loss_comes_back() -> None:
    assert_as_under_ddp(_with_closure)


# --- models that are changed, and graphs ----------------------------------------------------------------------------


def _changed_models(rank: int) -> list[str]:
    told = []
    model, optimizer = _pair()
    model.load_state_dict(mlp(torch.float64).state_dict(), assign=True)
    loss_of(model, rank, 0).backward()
    told.append(raised(optimizer.step))
    half = mlp()
    half, optimizer = fleet.distribute(half, sgd(half), small_buckets())
    half.double()
    told.append(raised(loss_of(half, rank, 0).backward))
    model, optimizer = _pair()
    told.append(raised(lambda: loss_of(model, rank, 0).backward(create_graph=True)))
    return told


def test_replaced_parameters_a_converted_model_and_gradients_with_a_graph_are_one_right_sentence_each() -> None:
    for assigned, converted, graph in run_ranks(_changed_models, 2):
        assert assigned.startswith("FleetError: optimizer.step() found no new gradients") and "assign=True" in assigned
        assert converted.startswith("ConfigError: `4.") and "torch.float64" in converted and "fleet.distribute(...)" in converted
        assert graph.startswith("ConfigError: the gradient of") and "create_graph=True" in graph and "autograd.grad" in graph


class Shared(nn.Module):
    """One layer used by two segments that are computed again in backward, and once outside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.shared, self.head = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: self.shared(x).tanh(), x, use_reentrant=True) if self.reentrant else self.shared(x).tanh()
        return self.head(self.shared(x))[:, :4]


def _reentrant(rank: int, spelling: str) -> tuple[Tensor, Tensor]:
    ended = []
    for reentrant in (True, False):
        model = Shared(reentrant)
        model, optimizer = fleet.distribute(model, sgd(model), small_buckets())
        for step in range(STEPS):
            loss = loss_of(model, rank, step)
            if spelling == "bare":
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            else:
                optimizer.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
        ended.append(weights(model))
    return ended[0], ended[1]


@pytest.mark.parametrize("spelling", ["bare", "optimizer.backward"])
def test_reentrant_checkpointing_of_a_shared_layer_trains_as_without(spelling: str) -> None:
    for reentrant, plain in run_ranks(_reentrant, 2, spelling):
        torch.testing.assert_close(reentrant, plain, rtol=1e-12, atol=1e-12)


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(grad)
        return x.grad, None


def _nested(rank: int) -> str:
    model = mlp(torch.float64)
    model, _ = fleet.distribute(model, sgd(model), small_buckets())
    x, y = rows(rank, 0)
    out = Nested.apply(x.requires_grad_(), model)
    return raised(F.cross_entropy(out, y).backward)


def test_a_backward_inside_a_function_of_the_users_is_one_right_sentence() -> None:
    for message in run_ranks(_nested, 2):
        assert message.startswith("FleetError: a backward inside another one"), message


# --- several pairs --------------------------------------------------------------------------------------------------


def _two_optimizers(rank: int, api: str) -> Tensor:
    inner = mlp(torch.float64)
    model: Any = inner
    first = torch.optim.SGD(inner[:2].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(inner[2:].parameters(), lr=0.01)
    if api == "fleetx":
        fleet.distribute(model, first, small_buckets())
        fleet.distribute(model, second, small_buckets())
    else:
        model = DistributedDataParallel(inner)
    for step in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        loss_of(model, rank, step).backward()
        nn.utils.clip_grad_norm_(inner.parameters(), 0.2)
        first.step()
        second.step()
    return weights(inner)


def test_two_optimizers_on_one_model_train_as_under_ddp() -> None:
    mine, theirs = run_ranks(_two_optimizers, 2, "fleetx"), run_ranks(_two_optimizers, 2, "ddp")
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-12, atol=1e-12)


def _two_models(rank: int) -> tuple[list[str], bool]:
    encoder, decoder, loose = cnn(), cnn(), nn.Parameter(torch.ones(1))
    caught = []
    for params in ([*encoder.parameters(), *decoder.parameters()], [*encoder.parameters(), loose]):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fleet.distribute(encoder, torch.optim.SGD(params, lr=0.1))
        caught.append("; ".join(str(w.message) for w in seen if issubclass(w.category, FleetWarning)))
    both = nn.ModuleList([encoder, decoder])
    both, optimizer = fleet.distribute(both, torch.optim.SGD(both.parameters(), lr=0.1))
    x, y = batch(rank, shape=(1, 6, 6))
    (F.cross_entropy(encoder(x), y) + F.cross_entropy(decoder(x), y)).backward()
    optimizer.step()
    statistics = fleet.util.all_gather(decoder[1].running_mean)
    return caught, torch.equal(statistics[0], statistics[1])


def test_a_second_model_with_statistics_under_one_optimizer_is_told_and_a_module_list_keeps_them_equal() -> None:
    (told, loose), equal = run_ranks(_two_models, 2)[0]
    assert "BatchNorm2d with buffers" in told and "torch.nn.ModuleList([model, other])" in told
    assert loose == "" and equal


def _due_misread(rank: int) -> str:
    model, optimizer = _pair(gradient_merge=True, gradient_merge_configs={"k_steps": 2})

    def train() -> None:
        for step in range(3):
            loss_of(model, rank, step).backward()
            if optimizer.due:
                optimizer.step()

    return raised(train)


def test_a_bare_loop_that_steps_only_when_due_is_told_to_step_always() -> None:
    for message in run_ranks(_due_misread, 2):
        assert message.startswith("ConfigError: optimizer.due was False after loss.backward()"), message


def _failed_backward(rank: int) -> Tensor:
    """A batch that fails in backward on every rank, is skipped, and leaves nothing behind."""
    model, optimizer = _pair()

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
    mine, reference = run_ranks(_failed_backward, 2), run_ranks(ddp, 2, _plain)
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], reference[0][0], rtol=1e-12, atol=1e-12)


def _twice_compressed(rank: int, part: str) -> tuple[list[str], list[Tensor]]:
    settings = {"powersgd": {"begin_step": 0, "rank": 2, "min_compression": 1.0}, "dgc": {"min_numel": 16, "sparsity": [0.5]}}
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


def test_two_backwards_an_update_add_up_under_powersgd_and_are_refused_under_dgc() -> None:
    ranks = run_ranks(_twice_compressed, 2, "powersgd")
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
    for told, _ in run_ranks(_twice_compressed, 2, "dgc"):
        assert told[0].startswith("ConfigError: a second backward before optimizer.step() under strategy.dgc"), told[0]
        assert "with fleet.no_sync():" in told[0] and told[1] == "nothing raised"


# --- between the calls ----------------------------------------------------------------------------------------------


def _looks_at_curvature(rank: int, **parts: Any) -> tuple[Tensor, list[bool]]:
    """autograd.grad of another loss between backward and step: it calls the hooks of parameters, and adds nothing."""
    model, optimizer = _pair(**parts)
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
        model, optimizer = _pair(**parts)
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


def _gan_nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 1, dtype=torch.float64)


def _gan_saved(rank: int, folder: str) -> tuple[bool, str]:
    generator, discriminator = _gan_nets()
    generator, g = fleet.distribute(generator, sgd(generator), small_buckets())
    discriminator, d = fleet.distribute(discriminator, sgd(discriminator), small_buckets())
    noise = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    discriminator.zero_grad()
    F.softplus(discriminator(generator(noise).detach())).mean().backward()
    d.step()
    F.softplus(-discriminator(generator(noise))).mean().backward()
    g.step()
    before = weights(discriminator)
    fleet.save_model(f"{folder}/d.safetensors", discriminator, d)
    return torch.equal(before, weights(discriminator)), raised(
        lambda: fleet.save_checkpoint(folder, step=1, model=discriminator, optimizer=d)
    )


def test_saving_after_the_generators_half_leaves_the_discriminator_as_it_is(tmp_path: Any) -> None:
    assert run_ranks(_gan_saved, 2, str(tmp_path)) == [(True, "nothing raised")] * 2


def _gan_merged(rank: int) -> list[str]:
    generator, discriminator = _gan_nets()
    merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    generator, g = fleet.distribute(generator, sgd(generator), small_buckets(**merged))
    discriminator, d = fleet.distribute(discriminator, sgd(discriminator), small_buckets(**merged))
    noise = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def train(spelling: str) -> None:
        for _ in range(4):
            discriminator.zero_grad()
            F.softplus(discriminator(generator(noise).detach())).mean().backward()
            d.step()
            loss = F.softplus(-discriminator(generator(noise))).mean()
            loss.backward() if spelling == "bare" else g.backward(loss)
            g.step()

    return [raised(lambda: train("optimizer.backward")), raised(lambda: train("bare"))]


def test_a_gan_under_gradient_merge_is_told_to_say_whose_loss_it_is() -> None:
    for ours, bare in run_ranks(_gan_merged, 2):
        assert ours == "nothing raised"
        assert bare.startswith("ConfigError: a backward of another pair's loss has reached this model inside a merge window"), (
            bare
        )
        assert "optimizer.backward(loss)" in bare


def _halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _hooked_later(model: nn.Module, optimizer: Any, rank: int) -> None:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    _plain(model, optimizer, rank)


def test_a_hook_registered_after_distribute_changes_gradients_before_they_are_sent() -> None:
    assert_as_under_ddp(_hooked_later)


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


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("out of memory, say")


def _flushed_after_failure(rank: int) -> str:
    model, optimizer = _pair(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    loss_of(model, rank, 0).backward()
    optimizer.step()
    x, y = rows(rank, 1)
    assert "out of memory" in raised(F.cross_entropy(model[2:](FailsInBackward.apply(model[:2](x))), y).backward)
    return raised(optimizer.flush)


def test_a_flush_after_a_failed_backward_is_refused() -> None:
    for message in run_ranks(_flushed_after_failure, 2):
        assert message.startswith("FleetError: a backward failed in this window"), message


def _in_between(rank: int) -> list[str]:
    model = mlp(torch.float64)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model[:4].parameters(), lr=0.1), small_buckets())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss_of(model, rank, 0).backward()
        told = [raised(lambda: optimizer.add_param_group({"params": list(model[4].parameters())}))]
        optimizer.step()
    told.append("; ".join(str(w.message) for w in seen if issubclass(w.category, FleetWarning)))
    other, optimizer = _pair(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    other[0].requires_grad_(False)
    for step in range(2):
        loss_of(other, rank, step).backward()
        optimizer.step()
    told.append(raised(lambda: loss_of(other, rank, 2).backward()))
    third, _ = _pair()
    told.append(raised(lambda: third(rows(rank, 0)[0]).sum().backward(create_graph=True)))
    return told


def test_groups_added_between_backward_and_step_unowned_parameters_and_frozen_layers_are_told_or_work() -> None:
    ranks = run_ranks(_in_between, 2)
    for rank, (added, unowned, frozen, graph) in enumerate(ranks):
        assert added.startswith("ConfigError: add_param_group between backward and step()"), added
        assert ("`4.weight` and 1 more parameters are trainable and in no optimizer" in unowned) == (rank == 0), unowned
        assert frozen == "nothing raised"
        assert "create_graph=True" in graph


def _skips_first(rank: int) -> str:
    model, optimizer = _pair()

    def train() -> None:
        for step in range(3):
            loss_of(model, rank, step).backward()
            if not (rank == 1 and step == 0):
                optimizer.step()
            for p in model.parameters():
                p.grad = None

    return raised(train)


def test_a_rank_that_skips_the_very_first_step_is_named_and_hangs_no_other() -> None:
    for message in run_ranks(_skips_first, 2):
        assert message.startswith("FleetError: the ranks have reduced different backwards together"), message


def _nan_in_own_step(rank: int) -> tuple[str, bool]:
    model = mlp(torch.float64)
    model, optimizer = fleet.distribute(model, TwoStep(model.parameters(), torch.optim.SGD, lr=0.1), small_buckets())
    (loss_of(model, rank, 0) * (float("nan") if rank else 1.0)).backward()
    return raised(optimizer.first_step), bool(weights(model).isfinite().all())


def test_a_nan_stops_a_method_that_updates_by_itself() -> None:
    for message, finite in run_ranks(_nan_in_own_step, 2):
        assert message.startswith("FleetError: update 1 was not made") and finite


def _by_hand_without_steps(rank: int, spelling: str) -> Tensor:
    """As in word_language_model: weights are changed through `.data`, and the optimizer that was given never steps."""
    model = mlp(torch.float64)
    run: nn.Module = model
    if spelling == "ours":
        fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), small_buckets())
    else:
        run = DistributedDataParallel(model)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(run, rank, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1)
    return weights(model)


def test_weights_that_are_changed_by_hand_are_as_under_ddp() -> None:
    mine, theirs = run_ranks(_by_hand_without_steps, 2, "ours"), run_ranks(_by_hand_without_steps, 2, "ddp")
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-12, atol=1e-12)


def _changed_by_hand(rank: int, zeroing: str, drifts: bool) -> None:
    model, optimizer = _pair()
    for step in range(3 if drifts else 12):
        (optimizer if zeroing == "optimizer" else model).zero_grad()
        loss_of(model, rank, step).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.1 * (1 + rank * drifts))


def _drifting_by_hand(rank: int, zeroing: str) -> list[str]:
    return [raised(lambda: _changed_by_hand(rank, zeroing, False)), raised(lambda: _changed_by_hand(rank, zeroing, True))]


@pytest.mark.parametrize("zeroing", ["model", "optimizer"])
def test_ranks_whose_weights_are_changed_by_hand_are_compared_too(zeroing: str) -> None:
    where = "backward 2 of update 1" if zeroing == "model" else "backward 1 of update 2"
    for alike, apart in run_ranks(_drifting_by_hand, 2, zeroing):
        assert alike == "nothing raised"
        assert apart.startswith(f"FleetError: after {where}") and "the ranks no longer hold the same model" in apart, apart


def _unfrozen_without_optimizer(rank: int) -> list[str]:
    model = mlp(torch.float64)
    model[2].requires_grad_(False)
    model, optimizer = fleet.distribute(model, sgd(nn.ModuleList([model[0], model[4]])), small_buckets(desync_check_steps=100))
    for step in range(10):
        if step == 3:
            model[2].requires_grad_(True)
        loss_of(model, rank, step).backward()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        if seen and step < 9:
            return [f"too early: {seen[0].message}"]
    return [str(warning.message) for warning in seen]


def test_parameters_unfrozen_in_mid_training_that_no_optimizer_holds_are_told() -> None:
    first, second = run_ranks(_unfrozen_without_optimizer, 2)
    assert len(first) == 1 and first[0].startswith("`2.weight` and 1 more parameters are trainable and in no optimizer"), first
    assert second == []


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


def _copied(rank: int) -> tuple[str, bool]:
    model, optimizer = _pair()
    loss_of(model, rank, 0).backward()
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    same = torch.equal(twin.state_dict()["state"][0]["momentum_buffer"], optimizer.state_dict()["state"][0]["momentum_buffer"])
    own = next(iter(model.parameters())) is not twin.param_groups[0]["params"][0]
    written = io.BytesIO()
    torch.save(optimizer, written)
    written.seek(0)
    read = torch.load(written, weights_only=False)
    return type(twin).__name__, same and own and type(read) is torch.optim.SGD


def test_a_copy_of_the_optimizer_is_the_plain_one_inside() -> None:
    assert run_ranks(_copied, 2) == [("SGD", True)] * 2


def _unlike_forward(rank: int) -> list[str]:
    model = mlp(torch.float64)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:]))
    amp = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="amp: ")  # slower on this CPU
        fleet.distribute(model, first, fleet.DistributedStrategy(**amp))
        refused = raised(lambda: fleet.distribute(model, second, fleet.DistributedStrategy()))
        alike = raised(lambda: fleet.distribute(model, second, fleet.DistributedStrategy(**amp)))
    return [refused, alike]


def test_two_optimizers_of_one_model_must_agree_on_what_acts_in_its_forward() -> None:
    for refused, alike in run_ranks(_unlike_forward, 2):
        assert refused.startswith("ConfigError: this model has another optimizer already"), refused
        assert "`amp` and none of them" in refused
        assert alike == "nothing raised"


def _warned_at(rank: int) -> list[str]:
    model, optimizer = _pair()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss_of(model, 0, 0).backward()  # the same batch on both ranks
        optimizer.step()
    return [warning.filename for warning in seen if issubclass(warning.category, FleetWarning)]


def test_a_warning_points_at_the_users_own_line() -> None:
    first, second = run_ranks(_warned_at, 2)
    assert first == [__file__] and second == []


def _alone_beside_dense(rank: int) -> tuple[Tensor, Tensor]:
    model = mlp(torch.float64)
    alone, dense = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:]))
    _, face = fleet.distribute(model, alone, fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4}))
    fleet.distribute(model, dense, fleet.DistributedStrategy())
    for step in range(12):
        alone.zero_grad()
        dense.zero_grad()
        loss_of(model, rank, step).backward()
        alone.step()
        dense.step()
    face.average()
    return weights(model[:2]), weights(model[2:])


def test_one_optimizer_may_let_ranks_train_alone_beside_one_that_does_not() -> None:
    (first, second), (other_first, other_second) = run_ranks(_alone_beside_dense, 2)
    torch.testing.assert_close(first, other_first, rtol=0, atol=0)
    torch.testing.assert_close(second, other_second, rtol=0, atol=0)


# --- what earlier updates left behind, and pairs that end ------------------------------------------------------------


def _never_zeroed_beside_another(rank: int, local: bool) -> Tensor:
    """With a second pair alive nothing is counted during backward; gradients of earlier updates still add up."""
    other = mlp(torch.float64)
    other, _other_optimizer = fleet.distribute(other, sgd(other), small_buckets())
    model, optimizer = _pair()
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
    _other = _pair()
    model, optimizer = _pair()
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


def _refused_again(rank: int) -> list[str]:
    model, optimizer = _pair()
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
    model, optimizer = _pair()
    fleet.distributed_model(model)
    fleet.distributed_model(model[2])
    loss_of(model, rank, 0).backward()
    return raised(optimizer.step)


def test_distributed_model_of_a_model_that_is_distributed_already_changes_nothing() -> None:
    assert run_ranks(_two_calls_and_one, 2) == ["nothing raised"] * 2


def _unlike_shared_layer(rank: int) -> str:
    layer = nn.Linear(4, 4)
    one, two = nn.Sequential(nn.Linear(4, 4), layer), nn.Sequential(layer, nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="amp: ")  # slower on this CPU
        amp = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
        _pair_of_one = fleet.distribute(one, torch.optim.SGD(one.parameters(), lr=0.1), amp)
        own = torch.optim.SGD(two[1].parameters(), lr=0.1)
        return raised(lambda: fleet.distribute(two, own, fleet.DistributedStrategy()))


def test_a_layer_shared_with_a_model_of_another_precision_is_named() -> None:
    for refused in run_ranks(_unlike_shared_layer, 2):
        assert refused.startswith("ConfigError: `0` of this model is in another distributed one already"), refused


def _unfrozen_on_one(rank: int) -> list[str]:
    limit, comm.SECONDS_BEFORE_WARNING = comm.SECONDS_BEFORE_WARNING, 0.2
    torch.distributed.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=3))
    model = mlp(torch.float64)
    for p in model[2].parameters():
        p.requires_grad_(False)
    model, optimizer = fleet.distribute(model, sgd(model), small_buckets())
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        for p in model[2].parameters():
            p.requires_grad_(True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        told = raised(lambda: loss_of(model, rank, 1).backward())
    comm.SECONDS_BEFORE_WARNING = limit
    return [told, *(str(warning.message) for warning in seen)]


def test_a_rank_that_unfreezes_alone_names_the_others_instead_of_waiting_for_ever() -> None:
    first, second = run_ranks(_unfrozen_on_one, 2)
    assert "rank 0 waits for rank 1, which added or unfroze no parameters" in first[1]
    assert "which added or unfroze no parameters before this update" in first[0], first
    assert second[0] != "nothing raised"


# --- an optimizer that is made later --------------------------------------------------------------------------------


def _new_optimizers(rank: int, api: str) -> Tensor:
    """One for each phase; the first is collected at another moment on each rank."""
    inner = mlp(torch.float64)
    model: Any = inner
    optimizer: Any = sgd(inner)
    if api == "ours":
        model, optimizer = fleet.distribute(inner, optimizer, small_buckets())
    else:
        model = DistributedDataParallel(inner)
    for step in range(3 * STEPS):
        if step % STEPS == 2:
            optimizer = torch.optim.SGD(inner.parameters(), lr=0.1 / (step + 1), momentum=0.9)
        if step == 3 + 2 * rank:
            gc.collect()
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step % STEPS > 3:
            loss_of(model, rank, 50 + step).backward()
        nn.utils.clip_grad_norm_(inner.parameters(), 0.2)
        optimizer.step()
    return weights(inner)


def test_a_new_optimizer_for_each_phase_trains_as_under_ddp_whenever_the_old_one_is_collected() -> None:
    mine, theirs = run_ranks(_new_optimizers, 2, "ours"), run_ranks(_new_optimizers, 2, "ddp")
    torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-12, atol=1e-12)


def _two_over_the_same(model: nn.Module, optimizer: Any, rank: int) -> None:
    """The one that was given, and one beside it that steps before it, after it, or alone; gradients are zeroed now and then."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    other = torch.optim.Adam(inner.parameters(), lr=0.01)  # type: ignore[union-attr]
    local = fleet.no_sync if inner is model else model.no_sync  # type: ignore[union-attr]
    for step in range(10):
        if step % 4:
            (other if step % 2 else model).zero_grad(set_to_none=step % 3 > 0)
        with local() if step in (5, 6) else contextlib.nullcontext():  # type: ignore[operator]
            loss_of(model, rank, step).backward()
        if step in (5, 6):
            loss_of(model, rank, 20 + step).backward()
        for stepped in ([other, optimizer], [optimizer, other], [other], [optimizer])[step % 4]:
            stepped.step()


def test_a_second_optimizer_over_the_same_parameters_steps_before_or_after_the_given_one() -> None:
    assert_as_under_ddp(_two_over_the_same)


def _by_parts(model: nn.Module, optimizer: Any, rank: int) -> None:
    """An optimizer for each layer, and backwards by the returned one's backward() where there is one."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    parts = [torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in inner.parameters()]  # type: ignore[union-attr]
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        optimizer.backward(loss) if hasattr(optimizer, "backward") and step % 2 else loss.backward()
        for part in parts:
            part.step()
            part.zero_grad()


def test_an_optimizer_for_each_parameter_takes_the_place_of_the_one_that_was_given() -> None:
    assert_as_under_ddp(_by_parts)


def _new_optimizer_with_statistics(rank: int, api: str) -> tuple[Tensor, int]:
    """Of a ModuleList that only distribute has seen."""
    first, second = cnn(), cnn()
    given = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    returned: Any = None
    if api == "ours":
        _, returned = fleet.distribute(nn.ModuleList([first, second]), given, small_buckets())
    del given
    held = [returned] if rank == 0 else []
    del returned
    gc.collect()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    ranks = [rank] if api == "ours" else [0, 1]
    for step in range(STEPS):
        optimizer.zero_grad()
        for r in ranks:
            x, y = batch(step * 2 + r, shape=(1, 6, 6))
            (F.cross_entropy(second.eval()(x), y) + F.cross_entropy(first.eval()(x), y)).div(len(ranks)).backward()
        optimizer.step()
    return torch.cat([weights(first), weights(second)]), held[0].pipeline.index if held and held[0] is not None else 0


def test_any_module_of_a_model_keeps_its_pair_alive_and_updates_of_others_are_counted() -> None:
    mine, alone = run_ranks(_new_optimizer_with_statistics, 2, "ours"), run_ranks(_new_optimizer_with_statistics, 1, "alone")
    torch.testing.assert_close(mine[0][0], mine[1][0], rtol=0, atol=0)
    torch.testing.assert_close(mine[0][0], alone[0][0], rtol=1e-5, atol=1e-6)
    assert mine[0][1] == STEPS - 1, "the last one is counted with the next backward"


PAST_PARTS: dict[str, dict[str, Any]] = {
    "lars": {"lars": True},
    "dgc": {"dgc": True},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 2}},
    "clip_norm": {"clip_norm": True},
    "gradient_merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "on_nan_inf": {"on_nan_inf": "skip"},
}


def _stepped_past(rank: int) -> list[str]:
    told = []
    for parts in PAST_PARTS.values():
        model = mlp(torch.float64)
        given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, _ = fleet.distribute(model, given, small_buckets(**parts))
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, rank, 0).backward()
        told.append(raised(other.step))
        before = weights(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)  # a merge window that was begun goes
            model, other = fleet.distribute(model, other, small_buckets())  # the line that it says
        loss_of(model, rank, 1).backward()
        other.step()
        assert not torch.equal(before, weights(model))
    model = mlp(torch.float64)
    fleet.distribute(model, sgd(model), small_buckets(gradient_merge=True, bf16_allreduce=True))
    loss_of(model, rank, 0).backward()
    told.append(raised(sgd(model).step))
    return told


def test_a_step_of_another_optimizer_that_would_leave_a_part_out_is_refused_with_the_line_to_write() -> None:
    for told in run_ranks(_stepped_past, 2):
        for message, part in zip(told, PAST_PARTS, strict=False):
            assert message.startswith("ConfigError: the SGD that is stepped here was not given to fleet.distribute(...)"), message
            assert f"strategy.{part}" in message and "model, optimizer = fleet.distribute(model, optimizer, strategy)" in message
        assert told[-1] == "nothing raised"


def _new_heads(rank: int) -> list[str]:
    told = []
    for of_all in (True, False):
        model, optimizer = _pair(find_unused_parameters=True)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        model[4] = nn.Linear(16, 4, dtype=torch.float64)
        optimizer = torch.optim.SGD((model if of_all else model[4]).parameters(), lr=0.1)
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        told.append(raised(optimizer.step))
    hooked, _ = _pair()
    by_hook = torch.optim.SGD(hooked.parameters(), lr=0.1)
    hooked[0].weight.register_post_accumulate_grad_hook(lambda _: by_hook.step())
    told.append(raised(lambda: loss_of(hooked, rank, 0).backward()))
    params = _only_parameters()
    gc.collect()
    told.append(raised(lambda: (params[0].sum() * rank).backward()))
    lone = nn.ParameterList(params)
    lone, optimizer = fleet.distribute(lone, torch.optim.SGD(lone.parameters(), lr=0.1), small_buckets())
    sum(p.sum() for p in lone).backward()  # type: ignore[union-attr]
    told.append(raised(optimizer.step))
    return told


def _only_parameters() -> list[nn.Parameter]:
    model, _ = _pair()
    return list(model.parameters())


def test_a_new_last_layer_a_step_inside_backward_and_a_discarded_model_are_told() -> None:
    for whole, head, hooked, discarded, together in run_ranks(_new_heads, 2):
        for message in (whole, head):
            assert message.startswith("ConfigError: the SGD that is stepped here was not given"), message
            assert "trains `4.weight`" in message and "fleet.distribute(model, optimizer, strategy)" in message
        assert hooked.startswith("ConfigError: this SGD is stepped while a backward is going on"), hooked
        assert discarded.startswith("ConfigError: the pair that fleet.distribute(...) made of these parameters was discarded")
        assert together == "nothing raised"


def _collected_and_copied(rank: int) -> tuple[list[bool], bool, list[str], bool]:
    model, optimizer = _pair()
    loss_of(model, rank, 0).backward()
    optimizer.step()
    keys = list(model.state_dict())
    copied, written = copy.deepcopy(model), io.BytesIO()
    torch.save(model, written)
    plain = [name for module in copied.modules() for name in vars(module) if "fleetx" in name]
    F.cross_entropy(copied(rows(rank, 1)[0]), rows(rank, 1)[1]).backward()  # nobody's business
    watched = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer.pipeline)]
    del optimizer
    gc.collect()
    kept = watched[2]() is not None
    del model
    gc.collect()
    is_plain = keys == list(mlp().state_dict()) and b"fleetx" not in written.getvalue()
    return [found() is None for found in watched], kept, plain, is_plain


def test_a_pair_is_collected_with_its_model_and_copies_of_the_model_have_none() -> None:
    for gone, kept, in_copy, is_plain in run_ranks(_collected_and_copied, 2):
        assert all(gone) and kept and in_copy == [] and is_plain


# --- ranks that do not come -----------------------------------------------------------------------------------------


def _one_backward_fewer(rank: int, spelling: str) -> str:
    """The last difference: a batch that one rank skips, and a loop that goes on after errors of its own."""
    model, optimizer = _pair()

    def train() -> None:
        for step in range(4):
            if rank == 1 and step == 1:
                continue
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            with contextlib.suppress(RuntimeError):
                loss.backward() if spelling == "bare" else optimizer.backward(loss)
            optimizer.step()

    return raised(train)


@pytest.mark.parametrize("spelling", ["bare", "optimizer.backward"])
def test_a_rank_that_waits_for_a_backward_that_no_other_makes_says_where_and_is_no_runtime_error(spelling: str) -> None:
    waiting, gone = run_ranks(_one_backward_fewer, 2, spelling)
    assert waiting.startswith("PeerError: rank 0 has lost the other ranks in backward 1 of update 4"), waiting
    assert "fleet.sampler(data)" in waiting and "The transport said: " in waiting
    assert gone == "nothing raised"
