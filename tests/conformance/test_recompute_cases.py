"""Recompute in the awkward cases: several backwards, state that forward leaves behind, and what happens before backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx.errors import FleetError
from recompute_nets import WIDTH, Chain, Inner, Norm, call_three_times
from recompute_runs import distribute, random_now, rows, seed

Loop = Callable[[Any, Any], None]


def loss_of(model: nn.Module, index: int) -> Tensor:
    x, y = rows(index)
    return F.cross_entropy(model(x), y)


def three_steps(model: Any, optimizer: Any) -> None:
    for step in range(3):
        optimizer.minimize(loss_of(model, step))


def same(build: Callable[[], nn.Module], loop: Loop = three_steps) -> None:
    """The whole state and all random numbers after the loop, with and without recompute of `unit`."""
    found = []
    for recompute in (None, ["unit"]):
        seed()
        model, optimizer = distribute(build(), recompute)
        seed(1)
        loop(model, optimizer)
        found.append(({name: value.clone() for name, value in model.state_dict().items()}, random_now()))
        del optimizer
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
    assert found[1][1] == found[0][1]


# --- several backwards through one forward ----------------------------------------------------------------------------------


def _one_loss_twice(model: Any, optimizer: Any) -> None:
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _two_losses_of_one_forward(model: Any, optimizer: Any) -> None:
    for step in range(3):
        x, y = rows(step)
        out = model(x)
        out.square().mean().backward(retain_graph=True)
        F.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _a_look_at_one_gradient(model: Any, optimizer: Any) -> None:
    for step in range(3):
        loss = loss_of(model, step)
        torch.autograd.grad(loss, [model.unit.enter.weight], retain_graph=True)
        optimizer.minimize(loss)


def _gradient_penalty(model: Any, optimizer: Any) -> None:
    for step in range(3):
        x, y = rows(step)
        out = model(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        optimizer.minimize(F.cross_entropy(out, y) + slope.square().mean())


@pytest.mark.xfail(strict=True, reason="what surrounds the second run can be entered only once", raises=AttributeError)
@pytest.mark.parametrize("loop", [_one_loss_twice, _two_losses_of_one_forward, _a_look_at_one_gradient, _gradient_penalty])
def test_a_unit_is_computed_again_for_each_backward_of_its_forward(loop: Loop, alone: None) -> None:
    same(lambda: Chain(Norm(), call_three_times), loop)


class Slope(Inner):
    """A gradient with respect to the input inside forward, as forces of an energy are computed."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(torch.tanh(self.enter(x)).square().sum(), x, create_graph=True)
        return torch.tanh(self.leave(x) + slope)


@pytest.mark.xfail(strict=True, reason="what surrounds the second run can be entered only once", raises=AttributeError)
def test_a_unit_that_takes_a_gradient_inside_its_forward_can_be_computed_again(alone: None) -> None:
    same(lambda: Chain(Slope()))


# --- buffers ----------------------------------------------------------------------------------------------------------------


class Cache(Inner):
    """Made in the first forward, as tables of positions are."""

    def __init__(self, registered: bool) -> None:
        super().__init__(Cache.scale)
        if registered:
            self.register_buffer("table", None)

    def scale(self, x: Tensor) -> Tensor:
        if getattr(self, "table", None) is None:
            self.register_buffer("table", torch.linspace(0.5, 1, x.shape[1]))
        return x * self.table


class UsedOnce(Inner):
    """A buffer that its first forward takes away."""

    def __init__(self) -> None:
        super().__init__(UsedOnce.scale)
        self.register_buffer("start", torch.full((WIDTH,), 2.0))

    def scale(self, x: Tensor) -> Tensor:
        if self.start is not None:
            x, self.start = x * self.start, None
        return x


class PastTheVersion(Inner):
    """A running mean written through `.data`, which torch does not count as a change."""

    def __init__(self, numel: int) -> None:
        super().__init__(PastTheVersion.centre)
        self.register_buffer("mean", torch.zeros(numel))

    def centre(self, x: Tensor) -> Tensor:
        self.mean.data[:WIDTH].mul_(0.9).add_(x.detach().mean(0))
        return x - self.mean[:WIDTH]


class Shared(nn.Module):
    """Two modules of a unit hold one buffer: the first counts it up, the second reads it."""

    def __init__(self) -> None:
        super().__init__()
        count = torch.zeros(())
        self.writes, self.reads = Inner(lambda unit, x: x + unit.count.add_(1)), Inner(lambda unit, x: x / unit.count)
        self.writes.register_buffer("count", count)
        self.reads.register_buffer("count", count)

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self.writes(x))


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(lambda: Cache(registered=True), id="made in the first forward, declared before"),
        pytest.param(lambda: Cache(registered=False), id="made in the first forward"),
        pytest.param(UsedOnce, id="taken away by the first forward"),
        pytest.param(lambda: PastTheVersion(WIDTH), id="written through data"),
        pytest.param(lambda: PastTheVersion(20_000), id="written through data, large"),
        pytest.param(Shared, id="shared by two modules"),
    ],
)
@pytest.mark.xfail(strict=True, reason="only buffers whose version or place changes are put back, each by itself")
def test_a_buffer_has_in_the_second_run_what_it_had_in_the_first(unit: Callable[[], nn.Module], alone: None) -> None:
    same(lambda: Chain(unit()))


class LateWrite(Inner):
    """Writes its large buffer from the second step on."""

    def __init__(self) -> None:
        super().__init__(LateWrite.write)
        self.register_buffer("large", torch.zeros(20_000))
        self.calls = 0

    def write(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:  # the first step makes two
            self.large.add_(1)
        return x + self.large[:WIDTH]


def test_a_large_buffer_written_first_in_a_later_call_is_an_error_that_names_unit_and_buffer(alone: None) -> None:
    model, optimizer = distribute(Chain(LateWrite()), ["unit"])
    optimizer.minimize(loss_of(model, 0))
    with pytest.raises(FleetError, match=r"the buffer `large` in `unit` was changed by its forward first in a later call"):
        model(rows(1)[0])


# --- arguments that forward changes, generators of its own ------------------------------------------------------------------


class TakesSkip(Inner):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x + skips.pop())


class LeavesSkip(Inner):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:  # type: ignore[override]
        skips.append(super().forward(x))
        return skips[-1]


def test_a_unit_may_leave_results_in_a_list_that_it_is_given(alone: None) -> None:
    def use(unit: nn.Module, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        return unit(unit(x, skips), skips) * skips.pop() + skips.pop()

    same(lambda: Chain(LeavesSkip(), use))


@pytest.mark.xfail(strict=True, reason="the second run is given the list as the first has left it", raises=IndexError)
def test_a_unit_may_take_tensors_out_of_a_list_that_it_is_given(alone: None) -> None:
    same(lambda: Chain(TakesSkip(), lambda unit, x: unit(x, [torch.sin(x)])))


class OwnGenerator(Inner):
    def __init__(self) -> None:
        super().__init__(lambda self, x: x * torch.rand(x.shape, generator=self.generator))
        self.generator = torch.Generator().manual_seed(3)


@pytest.mark.xfail(strict=True, reason="only the generators that everybody shares are put back")
def test_a_generator_that_a_unit_holds_gives_the_same_numbers_in_the_second_run(alone: None) -> None:
    same(lambda: Chain(OwnGenerator()))


# --- between forward and backward -------------------------------------------------------------------------------------------


class ByMode(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.leave(self.enter(x) * (2.0 if self.training else 3.0)))


def _put_into_evaluation_before_backward(model: Any, optimizer: Any) -> None:
    for step in range(3):
        model.train()
        loss = loss_of(model, step)
        model.eval()
        with torch.no_grad():
            loss_of(model, 10 + step)
        optimizer.minimize(loss)


@pytest.mark.xfail(strict=True, reason="the second run is in the mode of backward, not in that of forward")
@pytest.mark.parametrize("unit", [Norm, Inner, ByMode])
def test_a_unit_is_computed_again_in_the_mode_of_its_forward(unit: Callable[[], nn.Module], alone: None) -> None:
    same(lambda: Chain(unit()), _put_into_evaluation_before_backward)


@pytest.mark.parametrize(
    "recompute",
    [None, pytest.param(["unit"], marks=pytest.mark.xfail(strict=True, reason="gradients are those of the other weights"))],
)
def test_weights_changed_between_forward_and_backward_are_an_error(recompute: list[str] | None, alone: None) -> None:
    model, optimizer = distribute(Chain(Inner()), recompute)
    loss = loss_of(model, 0)
    with torch.no_grad():
        model.unit.leave.weight.add_(1)
    with pytest.raises((RuntimeError, FleetError), match=r"modified by an inplace operation|`unit"):
        optimizer.minimize(loss)
