"""The kernels' state is the state of every other way to run: saved, loaded, copied, cleared; and where kernels are refused."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.errors import ConfigError, FleetWarning
from fleetx.optim import Lamb, Lars
from tests.helpers import kernel_interpreter
from tests.helpers.kernel_interpreter import (
    CHUNK,
    LOOP,
    Run,
    assert_equal_bits,
    assert_same,
    both_ways,
    by_kernels,
    draw,
    take_steps,
)

interpreted = kernel_interpreter.interpreted
pytestmark = pytest.mark.usefixtures("interpreted")
both = pytest.mark.parametrize("kind", [Lars, Lamb])
VALUES = [draw(1, CHUNK + 9), draw(3, 2, seed=1), draw(5, seed=2)]


def named(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"{i}.{'weight' if param.ndim > 1 else 'bias'}", param) for i, param in enumerate(params)]


def step(params: list[nn.Parameter], optimizer: Any, number: int) -> None:
    for i, param in enumerate(params):
        param.grad = kernel_interpreter.drawn(number, i, param).to(param.dtype)
    optimizer.step()


# --- saved and loaded -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@both
def test_a_state_goes_from_kernels_to_lists_to_kernels_in_mid_run(kind: Any, dtype: torch.dtype) -> None:
    params = [nn.Parameter(value.to(dtype, copy=True)) for value in VALUES]
    state = None
    for number, options in enumerate([{}, {"foreach": True}, {}, LOOP]):
        optimizer = kind(named(params), lr=0.1, **options)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        step(params, optimizer if options else by_kernels(optimizer), number)
        state = optimizer.state_dict()
    wanted = take_steps(kind, VALUES, fused=False, dtype=dtype, rates=[0.1] * 4)
    assert_same(Run(params, optimizer, []), Run(wanted.params, wanted.optimizer, []))


@pytest.mark.parametrize("carry_norms", [False, True])
@both
def test_a_run_continued_from_a_saved_state_has_the_same_bits(kind: Any, carry_norms: bool) -> None:
    if kind is Lamb and carry_norms:
        pytest.skip("LAMB has no such option")
    options = {"carry_norms": True} if carry_norms else {}
    whole = take_steps(kind, VALUES, fused=True, rates=[0.1] * 3, **options)
    first = take_steps(kind, VALUES, fused=True, rates=[0.1] * 1, **options)
    second = kind(named(first.params), lr=7.0, **options)
    second.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    by_kernels(second)
    for number in (1, 2):
        step(first.params, second, number)
    assert_equal_bits(Run(first.params, second, []), Run(whole.params, whole.optimizer, []))


@pytest.mark.parametrize("always", [False, True], ids=["kernels before", "new"])
@both
def test_loading_into_an_optimizer_that_has_stepped_drops_what_it_knew(kind: Any, always: bool) -> None:
    """The state's tensors are others; a table of old addresses would move them on."""
    first = take_steps(kind, VALUES, fused=True, rates=[0.1] * 2)
    saved, weights = copy.deepcopy(first.optimizer.state_dict()), [p.detach().clone() for p in first.params]
    step(first.params, first.optimizer, 2)
    wanted = {i: {k: v.clone() for k, v in first.tensors(i).items()} for i in range(3)}
    with torch.no_grad():
        for param, weight in zip(first.params, weights, strict=True):
            param.copy_(weight)
    first.optimizer.load_state_dict(saved)
    if not always:
        by_kernels(first.optimizer)
    step(first.params, first.optimizer, 2)
    for i in range(3):
        for key, value in first.tensors(i).items():
            limit = 0.0 if not always else 1e-6 * wanted[i][key].abs().max().item()  # other chunks, another order of sums
            torch.testing.assert_close(value, wanted[i][key], rtol=0, atol=limit)


@both
def test_a_deep_copy_goes_on_alone_with_the_same_bits(kind: Any) -> None:
    first = take_steps(kind, VALUES, fused=True, rates=[0.1])
    params, twin = copy.deepcopy((first.params, first.optimizer))
    before = [p.detach().clone() for p in first.params]
    step(params, by_kernels(twin), 1)
    for param, old in zip(first.params, before, strict=True):
        torch.testing.assert_close(param.detach(), old, rtol=0, atol=0)
    step(first.params, first.optimizer, 1)
    assert_equal_bits(Run(params, twin, []), Run(first.params, first.optimizer, []))


# --- changed by the user --------------------------------------------------------------------------------------------------


def clear(optimizer: Any) -> None:
    optimizer.state.clear()


def replace(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def forget_one(optimizer: Any) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][0]]


def put_another(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][1]] = {}


def zero_in_place(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def put_other_tensors(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for name in optimizer.moments:
            state[name] = torch.full_like(state[name], 0.5)
        if "step" in state:
            state["step"] = torch.tensor(9.0)


def move_tensors(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data + 1.0


@pytest.mark.parametrize("change", [clear, replace, forget_one, put_another, zero_in_place, put_other_tensors, move_tensors])
@both
def test_state_that_the_user_changes_between_steps_counts(kind: Any, change: Any) -> None:
    def before(number: int, optimizer: Any) -> None:
        if number == 2:  # by now the same states have been seen twice
            change(optimizer)

    assert_same(*both_ways(kind, VALUES, rates=[0.1] * 3, before=before))


@both
def test_a_group_added_later_is_trained_too(kind: Any) -> None:
    runs = []
    for options in ({}, LOOP):
        params = [nn.Parameter(value.clone()) for value in VALUES]
        optimizer = kind(named(params)[:1], lr=0.1, **options)
        step(params[:1], optimizer if options else by_kernels(optimizer), 0)
        optimizer.add_param_group({"params": named(params)[1:], "lr": 0.5})
        for number in (1, 2):
            step(params, optimizer if options else by_kernels(optimizer), number)
        runs.append(Run(params, optimizer, [optimizer.trust_ratios()]))
    assert_same(*runs)


def turn(optimizer: Any) -> None:
    """As model.to(memory_format=torch.channels_last) does."""
    for param in optimizer.param_groups[0]["params"]:
        param.data = param.data.to(memory_format=torch.channels_last)


@both
def test_state_cleared_by_the_user_begins_again(kind: Any) -> None:
    def before(number: int, optimizer: Any) -> None:
        if number == 2:
            for state in optimizer.state.values():
                state.clear()

    assert_same(*both_ways(kind, VALUES, rates=[0.1] * 4, before=before))


@both
def test_parameters_turned_to_half_precision_in_mid_run_are_updated_right(kind: Any) -> None:
    def before(number: int, optimizer: Any) -> None:
        if number == 2:
            for param in optimizer.param_groups[0]["params"]:
                param.data, param.grad = param.data.half(), None
                param.grad = torch.ones_like(param)

    runs = []
    for options in ({}, LOOP):
        params = [nn.Parameter(value.clone()) for value in VALUES]
        optimizer = kind(named(params), lr=0.1, **options)
        for number in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            before(number, optimizer)
            (optimizer if options or number else by_kernels(optimizer)).step()
        assert params[0].dtype == torch.float16
        runs.append(Run([optimizer.state[param]["master"] for param in params], optimizer, [optimizer.trust_ratios()]))
    assert_same(*runs)


def turn_and_load(optimizer: Any) -> None:
    """A saved state lies in the usual order: so does every one that comes from a checkpoint."""
    saved = copy.deepcopy(optimizer.state_dict())
    turn(optimizer)
    optimizer.load_state_dict(saved)
    if optimizer._want_fused is None:
        by_kernels(optimizer)


@pytest.mark.parametrize("change", [turn, turn_and_load])
@both
def test_parameters_that_lie_otherwise_than_their_state_are_updated_right(kind: Any, change: Any) -> None:
    def before(number: int, optimizer: Any) -> None:
        if number == 1:
            change(optimizer)

    assert_same(*both_ways(kind, [draw(4, 3, 5, 5)], rates=[0.1] * 3, before=before))


# --- refused --------------------------------------------------------------------------------------------------------------


@both
def test_a_sparse_gradient_is_refused_by_name(kind: Any) -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    optimizer = by_kernels(kind(model.parameters(), lr=0.1, model=model))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"the gradient of 0\.weight is sparse, and La.* needs the norm of all of it"):
        optimizer.step()


def with_gaps() -> Tensor:
    return torch.stack([draw(3, 3), draw(3, 3)], dim=-1)[..., 0]


def at_an_odd_address() -> Tensor:
    return draw(10)[1:].view(3, 3)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: draw(3, 3).double(), "a parameter is torch.float64, and the kernels know float32, bfloat16 and float16"),
        (with_gaps, "a parameter has gaps in its memory"),
        (at_an_odd_address, "a parameter begins at an address that is no multiple of 16 bytes"),
    ],
)
@both
def test_parameters_that_kernels_do_not_take_are_refused_or_go_by_lists(kind: Any, value: Any, told: str) -> None:
    def made(**options: Any) -> Any:
        param = nn.Parameter(value())
        param.grad = torch.ones_like(param)
        return kind([param], lr=0.1, **options)

    with pytest.raises(ConfigError, match=f"fused=True, but {told}. Leave fused out, and list operations are used"):
        made(fused=True).step()
    optimizer = made()
    optimizer.step()
    assert optimizer._kernels is False


def test_more_groups_than_an_item_can_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetx.optim import kernels

    monkeypatch.setattr(kernels, "MOST_GROUPS", 2)
    params = [nn.Parameter(draw(2, 2)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ConfigError, match="fused=True, but there are 3 groups, and the kernels know 2"):
        Lars([{"params": [param]} for param in params], lr=0.1, fused=True).step()


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has gradients of the parameter's type only")
@pytest.mark.parametrize("allowed", [torch.float32, None])
@both
def test_gradients_wider_than_their_parameter_go_by_lists(kind: Any, allowed: torch.dtype | None) -> None:
    """The kernels would read them as if they were 16 bits wide."""
    param = nn.Parameter(draw(3, 3).half())
    param.grad_dtype = allowed
    param.grad = draw(3, 3, seed=1)
    with pytest.raises(ConfigError, match="fused=True, but a parameter's grad_dtype allows gradients of another type"):
        kind([param], lr=0.1, fused=True).step()
    optimizer = kind([param], lr=0.1)
    optimizer.step()
    assert optimizer._kernels is False and optimizer.state[param]["master"].dtype is torch.float32


@both
def test_without_the_interpreter_a_cpu_has_no_kernels(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    param = nn.Parameter(draw(3, 3))
    param.grad = torch.ones_like(param)
    with pytest.raises(ConfigError, match="fused=True, but the kernels run on CUDA devices, and some parameters are on cpu"):
        kind([param], lr=0.1, fused=True).step()
    optimizer = kind([param], lr=0.1)
    optimizer.step()
    assert optimizer._kernels is False


@both
def test_with_the_interpreter_a_cpu_has_kernels_unless_others_are_asked_for(kind: Any) -> None:
    def chosen(**options: Any) -> bool:
        param = nn.Parameter(draw(3, 3))
        param.grad = torch.ones_like(param)
        optimizer = kind([param], lr=0.1, **options)
        optimizer.step()
        return bool(optimizer._kernels)

    assert chosen() and chosen(fused=True) and not chosen(foreach=True) and not chosen(fused=False)


@pytest.fixture
def without_triton(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    from fleetx.optim import kernels

    kernels._warn_once.cache_clear()
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    return kernels


def warnings_of_two_optimizers(kind: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            param = nn.Parameter(draw(3, 3))
            param.grad = torch.ones_like(param)
            kind([param], lr=0.1).step()
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@both
def test_without_triton_one_warning_says_so_where_kernels_would_run(kind: Any, without_triton: Any) -> None:
    """The interpreter stands for a GPU."""
    told = "FleetWarning: Triton is not installed: LARS and LAMB run as list operations"
    assert [warning.startswith(told) for warning in warnings_of_two_optimizers(kind)] == [True]


@both
def test_without_triton_a_cpu_hears_nothing(kind: Any, without_triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert warnings_of_two_optimizers(kind) == []


@both
def test_without_triton_kernels_that_are_asked_for_are_refused(kind: Any, without_triton: Any) -> None:
    param = nn.Parameter(draw(3, 3))
    param.grad = torch.ones_like(param)
    with pytest.warns(FleetWarning), pytest.raises(ConfigError, match="fused=True, but Triton is not installed"):
        kind([param], lr=0.1, fused=True).step()
