"""Norms that the kernels of LARS need not measure: kept from the last update, given by code that has read the gradients, or both.

Whether a norm is known shows in what is launched: `lars_measure` reads weights, gradients, both, or does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.errors import ConfigError
from fleetx.optim import Lars
from tests.helpers import kernel_interpreter
from tests.helpers.kernel_interpreter import CHUNK, assert_equal_bits, assert_same, by_kernels, draw, take_steps

interpreted = kernel_interpreter.interpreted
pytestmark = pytest.mark.usefixtures("interpreted")
VALUES = [draw(1, CHUNK + 9), draw(2, CHUNK, seed=1), draw(1, 7, seed=2), draw(5, seed=3)]
BOTH, WEIGHTS, GRADIENTS = {"weights", "gradients"}, {"weights"}, {"gradients"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> list[set[str]]:
    """What each launch of `lars_measure` reads."""
    from fleetx.optim.kernels import fused as module

    launches: list[set[str]] = []
    launch = module.launch

    def recording(kernel: Any, plan: Any, items: Tensor, *arguments: Any) -> None:
        if kernel.__name__ == "lars_measure" and items.numel():
            read = dict(zip(kernel.arg_names, (items, *arguments), strict=True))
            launches.append({name for name, flag in [("weights", "READ_WEIGHT"), ("gradients", "READ_GRAD")] if read[flag]})
        launch(kernel, plan, items, *arguments)

    monkeypatch.setattr(module, "launch", recording)
    return launches


# --- kept -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_norms_lead_to_the_same_bits(dtype: torch.dtype, measured: list[set[str]]) -> None:
    plain = take_steps(Lars, VALUES, fused=True, dtype=dtype, rates=(0.1, 0.3, 0.2))
    assert measured == [BOTH, BOTH, BOTH]
    measured.clear()
    assert_equal_bits(take_steps(Lars, VALUES, fused=True, dtype=dtype, rates=(0.1, 0.3, 0.2), carry_norms=True), plain)
    assert measured == [BOTH, GRADIENTS, GRADIENTS]


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def replaced(model: nn.Module) -> None:
    model[0].weight.data = 2 * model[0].weight.data


def one_row(model: nn.Module) -> None:
    torch.nn.init.constant_(model[0].weight[:1], 3.0)


def ratio_of(weight: Tensor, grad: Tensor) -> float:
    """With the default settings."""
    p, g = weight.detach().double().norm().item(), grad.double().norm().item()
    return 0.001 * p / (g + 0.0005 * p)


def one_layer(**options: Any) -> tuple[nn.Sequential, Any]:
    """Two chunks, one step done."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20, bias=False))
    optimizer = by_kernels(Lars(model.parameters(), lr=0.1, model=model, **options))
    model[0].weight.grad = draw(20, 20, seed=1)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("write", [in_place, loaded, replaced, one_row])
def test_a_kept_norm_is_dropped_when_other_code_writes_the_parameter(
    write: Callable[[nn.Module], None], measured: list[set[str]]
) -> None:
    model, optimizer = one_layer(carry_norms=True)
    optimizer.step()
    write(model)
    wanted = ratio_of(model[0].weight, model[0].weight.grad)
    optimizer.step()
    assert measured == [BOTH, GRADIENTS, BOTH]
    assert optimizer.trust_ratios().by_name == {"0.weight": pytest.approx(wanted, rel=1e-6)}
    optimizer.step()
    assert measured[3:] == [GRADIENTS]


def test_a_write_through_data_is_seen_after_forget_norms() -> None:
    told, untold = (one_layer(carry_norms=True) for _ in range(2))
    for model, optimizer in (told, untold):
        model[0].weight.data.mul_(2)
        if optimizer is told[1]:
            optimizer.forget_norms()
    wanted = ratio_of(told[0][0].weight, told[0][0].weight.grad)
    for _, optimizer in (told, untold):
        optimizer.step()
    assert told[1].trust_ratios().max == pytest.approx(wanted, rel=1e-6)
    assert untold[1].trust_ratios().max == pytest.approx(wanted / 2, rel=1e-3)


def test_forget_norms_before_the_first_step_is_no_obstacle() -> None:
    param = nn.Parameter(draw(3, 3))
    optimizer = Lars([param], lr=0.1)
    optimizer.forget_norms()
    param.grad, before = torch.ones_like(param), param.detach().clone()
    optimizer.step()
    assert not torch.equal(param, before)


def test_a_step_without_some_gradients_drops_kept_norms(measured: list[set[str]]) -> None:
    """Who had none has not moved; but the sums belong to another plan."""

    def gradients(step: int, i: int, param: nn.Parameter) -> Tensor | None:
        return None if (step, i) == (1, 0) else draw(*param.shape, seed=10 * step + i)

    options: dict[str, Any] = {"gradients": gradients, "rates": [0.1] * 4}
    found = take_steps(Lars, VALUES, fused=True, carry_norms=True, **options)
    assert measured == [BOTH, BOTH, BOTH, GRADIENTS]
    assert_equal_bits(found, take_steps(Lars, VALUES, fused=True, **options))


def test_kept_norms_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(draw(3, 3))
    optimizer = Lars([weight], lr=0.1, carry_norms=True)
    monkeypatch.delenv("TRITON_INTERPRET")  # as if the parameters had been moved since
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ConfigError, match="carry_norms=True saves the kernels a pass, and they do not run here"):
        optimizer.step()


# --- given ----------------------------------------------------------------------------------------------------------------


def give(step: int, optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.take_gradient_norms(params, torch.stack([p.grad.float().norm() for p in params]).unbind())


@pytest.mark.parametrize("carry_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_given_norms_lead_to_the_same_steps(dtype: torch.dtype, carry_norms: bool, measured: list[set[str]]) -> None:
    plain = take_steps(Lars, VALUES, fused=True, dtype=dtype, rates=(0.1, 0.3, 0.2))
    measured.clear()
    found = take_steps(Lars, VALUES, fused=True, dtype=dtype, rates=(0.1, 0.3, 0.2), before=give, carry_norms=carry_norms)
    assert measured == ([WEIGHTS] if carry_norms else [WEIGHTS] * 3)
    assert_same(found, plain)


def test_a_given_norm_is_used_and_used_once(measured: list[set[str]]) -> None:
    """A wrong one shows: twice the gradient's norm, about half the ratio."""
    model, optimizer = one_layer()
    weight = model[0].weight
    wrong = ratio_of(weight, 2 * weight.grad)
    optimizer.take_gradient_norms([weight], [2 * weight.grad.norm()])
    optimizer.step()
    assert optimizer.trust_ratios().by_name == {"0.weight": pytest.approx(wrong, rel=1e-6)}
    right = ratio_of(weight, weight.grad)
    optimizer.step()
    assert optimizer.trust_ratios().by_name == {"0.weight": pytest.approx(right, rel=1e-6)}
    assert measured == [BOTH, WEIGHTS, BOTH]


def test_norms_given_for_a_step_that_is_refused_are_gone() -> None:
    table = nn.Embedding(200, 2, sparse=True)
    optimizer = by_kernels(Lars([("table", table.weight)], lr=0.1))
    table(torch.tensor([1])).sum().backward()
    optimizer.take_gradient_norms([table.weight], [torch.tensor(1000.0)])
    with pytest.raises(ConfigError, match="the gradient of table is sparse"):
        optimizer.step()
    table.weight.grad = None
    table.weight.grad = draw(200, 2)
    wanted = ratio_of(table.weight, table.weight.grad)
    optimizer.step()
    assert optimizer.trust_ratios().max == pytest.approx(wanted, rel=1e-6)


def test_when_both_norms_are_known_small_tensors_use_them_too(measured: list[set[str]]) -> None:
    """A tensor of one chunk is measured where it is updated, as long as one of its norms has to be."""

    def wrong(step: int, optimizer: Any) -> None:
        params = optimizer.param_groups[0]["params"]
        optimizer.take_gradient_norms(params, [2 * p.grad.norm() for p in params])

    found = take_steps(Lars, [draw(1, 7)], fused=True, rates=[0.1, 0.1], before=wrong, carry_norms=True)
    assert found.ratios[0] is not None and found.ratios[1] is not None and measured == []
    grads = [draw(1, 7, seed=1000), draw(1, 7, seed=1100)]
    assert found.ratios[0].max == pytest.approx(ratio_of(draw(1, 7), grads[0]), rel=1e-6)
    assert found.ratios[1].max == pytest.approx(ratio_of(draw(1, 7), 2 * grads[1]), rel=1e-3)


@pytest.mark.parametrize(
    "norms", [lambda params: {}, lambda params: dict.fromkeys(params[:1], torch.tensor(9.0)),
              lambda params: dict.fromkeys(params, torch.tensor(9.0, dtype=torch.float64))],
    ids=["none", "of some", "in float64"],
)  # fmt: skip
def test_norms_that_do_not_serve_all_are_measured(norms: Callable[[Any], dict[Any, Tensor]], measured: list[set[str]]) -> None:
    def hand_over(step: int, optimizer: Any) -> None:
        given = norms(optimizer.param_groups[0]["params"])
        optimizer.take_gradient_norms(list(given), list(given.values()))

    plain = take_steps(Lars, VALUES, fused=True, rates=[0.1])
    assert_equal_bits(take_steps(Lars, VALUES, fused=True, rates=[0.1], before=hand_over), plain)
    assert measured == [BOTH, BOTH]


def test_given_norms_serve_a_step_without_some_gradients() -> None:
    """Norms are given for those that have a gradient."""

    def gradients(step: int, i: int, param: nn.Parameter) -> Tensor | None:
        return None if i == step else draw(*param.shape, seed=10 * step + i)

    def hand_over(step: int, optimizer: Any) -> None:
        having = [p for p in optimizer.param_groups[0]["params"] if p.grad is not None]
        optimizer.take_gradient_norms(having, [p.grad.norm() for p in having])

    options: dict[str, Any] = {"gradients": gradients, "rates": [0.1] * 2}
    found = take_steps(Lars, VALUES, fused=True, before=hand_over, carry_norms=True, **options)
    assert_same(found, take_steps(Lars, VALUES, fused=True, **options))


def test_norms_are_wanted_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def wants(**options: Any) -> bool:
        return Lars([nn.Parameter(draw(3, 3))], lr=0.1, **options).wants_gradient_norms

    assert wants() and not wants(foreach=True) and not wants(fused=False)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not wants()
