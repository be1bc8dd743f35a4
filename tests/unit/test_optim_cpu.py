"""LARS and LAMB on a CPU: torch's fused kernels in their service, the list operations they stand for, and norms in rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.optim import Lamb, Lars, list_ops

both = pytest.mark.parametrize("kind", [Lars, Lamb])
LOOP = {"foreach": False, "fused": False}


@pytest.fixture(params=[True, False], ids=["kernels", "lists"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With torch's kernels and as if torch had none."""
    assert list_ops.KERNELS
    monkeypatch.setattr(list_ops, "KERNELS", request.param)
    return bool(request.param)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Grows by the number of tensors at each call of one of torch's kernels."""
    calls: list[int] = []
    kernel = getattr(torch, name)

    def counting(params: list[Tensor], *args: Any, **options: Any) -> Any:
        calls.append(len(params))
        return kernel(params, *args, **options)

    monkeypatch.setattr(torch, name, counting)
    return calls


# --- norms --------------------------------------------------------------------------------------------------------------


def test_the_norm_of_a_large_float32_tensor_is_right_to_seven_digits() -> None:
    """torch's own is off by 4e-5 here."""
    tensor = draw(1536, 1537)
    assert list_ops.cpu_norms([tensor]) == pytest.approx([tensor.double().norm().item()], rel=1e-7)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps"])
def test_norms_of_all_sizes_and_layouts_are_those_of_their_elements(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_ops, "ROW_ELEMENTS", 8)
    tensors = []
    for channels in (0, 1, 2, 3, 8, 9, 64):
        tensor = draw(channels, 2, 2, 2, seed=channels)
        tensor = tensor.to(memory_format=torch.channels_last) if layout == "channels_last" else tensor
        tensors.append(torch.stack([tensor, tensor], dim=-1)[..., 0] if layout == "gaps" else tensor)
    tensors += [torch.tensor(-3.0), draw(7), draw(8), draw(9)]
    wanted = [tensor.double().square().sum().sqrt().item() for tensor in tensors]
    assert list_ops.cpu_norms(tensors) == pytest.approx(wanted, rel=1e-6)


# --- what the kernels are given -------------------------------------------------------------------------------------------


def test_kernels_take_tensors_that_lie_in_memory_alike() -> None:
    plain, other = draw(4, 3, 5, 5), draw(4, 3, 5, 5, seed=1)
    turned = other.to(memory_format=torch.channels_last)
    gaps = torch.stack([plain, plain], dim=-1)[..., 0]
    assert list_ops.kernels_take([plain, turned], [other, turned.clone(memory_format=torch.preserve_format)])
    assert not list_ops.kernels_take([plain], [turned])
    assert not list_ops.kernels_take([gaps], [gaps])
    assert not list_ops.kernels_take([plain.to("meta")], [other.to("meta")])


def step_once(params: list[nn.Parameter], **options: Any) -> Lars:
    optimizer = Lars(params, exclude_from_weight_decay=[], **options)
    for i, param in enumerate(params):
        param.grad = draw(*param.shape, seed=50 + i).to(param.dtype)
    optimizer.step()
    return optimizer


def test_excluded_tensors_share_one_call_and_adapted_ones_have_their_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = called(monkeypatch, "_fused_sgd_")
    step_once([nn.Parameter(draw(5, seed=i)) for i in range(4)], lr=0.1)
    assert calls == [1, 1, 1, 1]
    calls.clear()
    groups = [{"params": [nn.Parameter(draw(5, seed=i)) for i in range(4)], "adapt": False}]
    optimizer = Lars(groups, lr=0.1)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert calls == [4]


@pytest.mark.parametrize(
    ("rate", "kernel"), [(1.0, True), (1e-3, True), (1e-6, True), (1e-8, True), (1e-10, False), (1e-14, False)]
)
def test_no_digits_of_a_small_rate_are_lost(rate: float, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is told 1 - rate; where that costs digits, lists do it."""
    calls = called(monkeypatch, "_fused_sgd_")
    param, grad = nn.Parameter(draw(300)), draw(300, seed=1)
    optimizer = Lars([{"params": [param], "adapt": False, "decay": True}], lr=rate, weight_decay=0.5)
    velocity = torch.zeros(300, dtype=torch.float64)
    for _ in range(2):
        param.grad = grad.clone()
        velocity = 0.9 * velocity + rate * (grad.double() + 0.5 * param.detach().double())
        optimizer.step()
    found = optimizer.state[param]["momentum_buffer"].double()
    torch.testing.assert_close(found, velocity, rtol=0, atol=3e-7 * velocity.abs().max().item())
    assert bool(calls) == kernel


def test_float64_is_not_trusted_to_a_rate_that_loses_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = called(monkeypatch, "_fused_sgd_")
    step_once([nn.Parameter(draw(5).double())], lr=0.1)
    assert calls == []


def test_a_rate_of_zero_moves_nothing_but_the_velocity(way: bool) -> None:
    param = nn.Parameter(draw(6))
    optimizer = step_once([param], lr=0.0)
    torch.testing.assert_close(param.detach(), draw(6), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], torch.zeros(6), rtol=0, atol=0)


# --- the same results ---------------------------------------------------------------------------------------------------


def model_like(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Below a row, of whole rows, of rows and a rest, and of several blocks; one in channels_last."""
    shapes = [(5,), (64, 64), (3, 41), (40, 30, 3, 3), (33, 1031)]
    params = [nn.Parameter(draw(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]
    params[3] = nn.Parameter(params[3].detach().to(memory_format=torch.channels_last))
    return params


def run(kind: Any, dtype: torch.dtype, *, steps: int = 4, **options: Any) -> tuple[list[nn.Parameter], Any]:
    params = model_like(dtype)
    named = [(f"{i}.{'bias' if i == 0 else 'weight'}", param) for i, param in enumerate(params)]
    optimizer = kind(named, lr=0.1, **options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        for i, param in enumerate(params):
            grad = draw(*param.shape, seed=100 * step + i).to(dtype)
            param.grad = grad.to(memory_format=torch.channels_last) if i == 3 else grad
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"weight_decay": 0.0}])
@both
def test_float32_stays_beside_the_float64_loop(
    kind: Any, options: dict[str, Any], way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 2^12 elements: the largest tensor has nine. The measure is the largest value in a tensor."""
    monkeypatch.setattr(list_ops, "ROW_ELEMENTS", 2**10)
    monkeypatch.setattr(list_ops, "BLOCK_ELEMENTS", 2**12)
    found, ours = run(kind, torch.float32, **options)
    exact, reference = run(kind, torch.float64, **LOOP, **options)
    for a, b in zip(found, exact, strict=True):
        states = [(ours.state[a][name], reference.state[b][name]) for name in ours.moments]
        for mine, right in [(a.detach(), b.detach()), *states]:
            torch.testing.assert_close(mine.double(), right, rtol=0, atol=1e-6 * right.abs().max().item())
        if kind is Lamb:
            assert ours.state[a]["step"] == 4.0
    if ours.trust_ratios() is not None:
        assert ours.trust_ratios().by_name == pytest.approx(reference.trust_ratios().by_name, rel=1e-5)


@both
def test_gradients_are_not_touched_and_parameters_are_seen_to_change(kind: Any, way: bool) -> None:
    params, optimizer = run(kind, torch.float32, steps=1)
    kept = [param.grad.clone() for param in params if param.grad is not None]
    versions = [param._version for param in params]
    optimizer.step()
    for param, grad, version in zip(params, kept, versions, strict=True):
        assert param.grad is not None and param._version > version
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0)


@both
def test_a_learning_rate_in_a_tensor_counts_as_its_number(kind: Any, way: bool) -> None:
    results = []
    for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        param = nn.Parameter(draw(70, 70))
        optimizer = kind([param], lr=lr)
        param.grad = draw(70, 70, seed=1)
        optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_without_momentum_the_velocity_is_the_last_step(way: bool) -> None:
    param = nn.Parameter(draw(6))
    optimizer = step_once([param], lr=0.1, momentum=0.0)
    optimizer.step()
    before = param.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - param.detach(), optimizer.state[param]["momentum_buffer"], rtol=1e-3, atol=1e-7)


@both
def test_decayed_tensors_that_are_not_adapted_keep_their_decay(kind: Any, way: bool) -> None:
    results = []
    for options in ({}, LOOP):
        param = nn.Parameter(draw(80, 90))
        optimizer = kind([{"params": [param], "adapt": False, "decay": True}], lr=0.01, weight_decay=0.3, **options)
        param.grad = draw(80, 90, seed=1)
        optimizer.step()
        assert optimizer.trust_ratios() is None
        results.append(param.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
