"""Guards loops that keep using the optimizer they gave: its own methods, closures, copies, and weights changed by hand."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.ddp_loops import STEPS, assert_as_under_ddp, loss_of, make_pair, sgd, small_buckets, weights
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import mlp


class Lion(torch.optim.Optimizer):
    """A user's own: the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(torch.lerp(momentum, p.grad, 0.1).sign_(), alpha=group["lr"])
                momentum.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "Adam, fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    "a user's own": lambda model: Lion(model.parameters(), lr=0.01),
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


def _due_misread(rank: int) -> str:
    model, optimizer = make_pair(gradient_merge=True, gradient_merge_configs={"k_steps": 2})

    def train() -> None:
        for step in range(3):
            loss_of(model, rank, step).backward()
            if optimizer.due:
                optimizer.step()

    return raised(train)


def test_a_bare_loop_that_steps_only_when_due_is_told_to_step_always() -> None:
    for message in run_ranks(_due_misread, 2):
        assert message.startswith("ConfigError: optimizer.due was False after loss.backward()"), message


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


def _copied(rank: int) -> tuple[str, bool]:
    model, optimizer = make_pair()
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


def _warned_at(rank: int) -> list[str]:
    model, optimizer = make_pair()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss_of(model, 0, 0).backward()  # the same batch on both ranks
        optimizer.step()
    return [warning.filename for warning in seen if issubclass(warning.category, FleetWarning)]


def test_a_warning_points_at_the_users_own_line() -> None:
    first, second = run_ranks(_warned_at, 2)
    assert first == [__file__] and second == []
