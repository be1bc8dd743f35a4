"""Recompute when one forward has several backwards, and when something happens between the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx.errors import FleetError
from tests.helpers.recompute_nets import Chain, Inner, Norm, call_three_times
from tests.helpers.recompute_runs import Loop, distribute, gradient_penalty, loss_of, one_loss_twice, rows, same_in_loop

# --- several backwards through one forward ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("loop", [one_loss_twice, _two_losses_of_one_forward, _a_look_at_one_gradient, gradient_penalty])
def test_a_unit_is_computed_again_for_each_backward_of_its_forward(loop: Loop, alone: None) -> None:
    same_in_loop(lambda: Chain(Norm(), call_three_times), loop)


class Slope(Inner):
    """A gradient with respect to the input inside forward, as forces of an energy are computed."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(torch.tanh(self.enter(x)).square().sum(), x, create_graph=True)
        return torch.tanh(self.leave(x) + slope)


def test_a_unit_that_takes_a_gradient_inside_its_forward_can_be_computed_again(alone: None) -> None:
    same_in_loop(lambda: Chain(Slope()))


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


@pytest.mark.parametrize("unit", [Norm, Inner, ByMode])
def test_a_unit_is_computed_again_in_the_mode_of_its_forward(unit: Callable[[], nn.Module], alone: None) -> None:
    same_in_loop(lambda: Chain(unit()), _put_into_evaluation_before_backward)


@pytest.mark.parametrize(
    ("recompute", "error", "text"),
    [
        (None, RuntimeError, "modified by an inplace operation"),
        (["unit"], FleetError, r"recompute: the weight `leave\.weight` of `unit` was changed in place after its forward"),
    ],
)
def test_weights_changed_between_forward_and_backward_are_an_error(
    recompute: list[str] | None, error: type[Exception], text: str, alone: None
) -> None:
    model, optimizer = distribute(Chain(Inner()), recompute)
    loss = loss_of(model, 0)
    with torch.no_grad():
        model.unit.leave.weight.add_(1)
    with pytest.raises(error, match=text):
        optimizer.minimize(loss)
