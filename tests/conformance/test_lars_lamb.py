"""LARS and LAMB against the formulas, written again in NumPy (tests/helpers/layerwise_reference.py): float64, to 1e-12."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetx.optim import Lamb, Lars, list_ops
from tests.helpers.layerwise_reference import LambTensor, LarsTensor

WAYS: dict[str, dict[str, Any]] = {"loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True}}
way = pytest.mark.parametrize("way", WAYS)
both = pytest.mark.parametrize("kind", [Lars, Lamb])
shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=2, max_size=5)


def array(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.detach().double().numpy().copy()


def assert_near(ours: Tensor, reference: NDArray[np.float64], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours.detach(), torch.as_tensor(reference), rtol=tolerance, atol=tolerance)


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rule", ["lars", "lamb"])
@way
@settings(max_examples=50, deadline=None)
@given(shapes=shapes, seed=st.integers(0, 10**6), maximize=st.booleans(), epsilon=st.sampled_from([0.0, 1e-3]))
def test_many_tensors_follow_the_formulas(
    rule: str, way: str, shapes: list[tuple[int, ...]], seed: int, maximize: bool, epsilon: float
) -> None:
    """Two groups with rates and decays of their own; a zero weight, zero and missing gradients; a rate that changes each step."""
    rng = np.random.default_rng(seed)
    params = [nn.Parameter(draw(shape, seed + i) * (0.0 if rng.random() < 0.2 else 1.0)) for i, shape in enumerate(shapes)]
    cut = int(rng.integers(1, len(params)))
    flags = [{"decay": bool(rng.random() < 0.7), "adapt": bool(rng.random() < 0.7)} for _ in range(2)]
    decays = [0.01, 0.3]
    groups = [
        {"params": group, "weight_decay": wd, "lr": 0.0, **flag}
        for group, wd, flag in zip((params[:cut], params[cut:]), decays, flags, strict=True)
    ]
    references: list[Any] = []
    for i, param in enumerate(params):
        of = int(i >= cut)
        if rule == "lars":
            references.append(LarsTensor(array(param), coeff=0.05, wd=decays[of], eps=epsilon, mu=0.8, **flags[of]))
        else:
            references.append(LambTensor(array(param), wd=decays[of], eps=epsilon or 1e-6, betas=(0.8, 0.95), **flags[of]))
    ours = (
        Lars(groups, lr=1.0, momentum=0.8, lars_coeff=0.05, epsilon=epsilon, maximize=maximize, **WAYS[way])
        if rule == "lars"
        else Lamb(groups, betas=(0.8, 0.95), eps=epsilon or 1e-6, maximize=maximize, **WAYS[way])
    )
    for step in range(4):
        rates = rng.uniform(0.001, 0.5, 2)
        for group, rate in zip(ours.param_groups, rates, strict=True):
            group["lr"] = float(rate)
        for i, (param, reference) in enumerate(zip(params, references, strict=True)):
            chance = rng.random()
            grad = draw(tuple(param.shape), seed + 100 * step + i) * (0.0 if chance < 0.15 else 1.0)
            param.grad = None if chance > 0.85 else grad
            wanted = None if param.grad is None else array(-grad if maximize else grad)
            reference.step(wanted, float(rates[int(i >= cut)]))
        ours.step()
        for param, reference in zip(params, references, strict=True):
            assert_near(param, reference.p)


# --- numbers from elsewhere -------------------------------------------------------------------------------------------

P0 = [0.5, -1.0, 2.0, 0.25]
GRADS = [[0.1, -0.2, 0.3, 0.4], [-0.05, 0.1, 0.2, -0.1], [0.2, 0.2, -0.1, 0.05]]


def after(optimizer: Any, param: nn.Parameter, rates: list[float]) -> list[Tensor]:
    weights = []
    for grad, rate in zip(GRADS, rates, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        param.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        weights.append(param.detach().clone())
    return weights


@way
def test_lars_gives_the_published_rules_numbers(way: str) -> None:
    """The order of the paper, Paddle and MLPerf; at a rate that changes, that of timm would give 0.4886, that of NUS 0.4790."""
    param = nn.Parameter(torch.tensor(P0, dtype=torch.float64))
    ours = Lars([("weight", param)], lr=10.0, momentum=0.9, weight_decay=0.01, lars_coeff=0.001, epsilon=1e-8,
                exclude_from_weight_decay=[], **WAYS[way])  # fmt: skip
    first, _, third = after(ours, param, [10.0, 20.0, 5.0])
    assert_near(first, np.array([0.495759896, -0.991519791, 1.987077777, 0.233746267]), 1e-9)
    assert_near(third, np.array([0.495797415, -1.012257145, 1.897720523, 0.235258292]), 1e-9)


@way
def test_an_excluded_tensor_moves_at_the_plain_rate(way: str) -> None:
    """As in Paddle's CPU kernel and in MLPerf's reference: p - 10 g."""
    param = nn.Parameter(torch.tensor(P0, dtype=torch.float64))
    first, *_ = after(Lars([("bias", param)], lr=10.0, **WAYS[way]), param, [10.0])
    assert_near(first, np.array([-0.5, 1.0, -1.0, -3.75]))


@way
def test_lamb_gives_the_published_rules_numbers(way: str) -> None:
    param = nn.Parameter(torch.tensor(P0, dtype=torch.float64))
    ours = Lamb([("weight", param)], lr=0.01, weight_decay=0.01, exclude_from_weight_decay=[], **WAYS[way])
    first, _, third = after(ours, param, [0.01, 0.02, 0.005])
    assert_near(first, np.array([0.488525829, -0.988468685, 1.988354494, 0.238554286]), 1e-9)
    assert_near(third, np.array([0.470532045, -0.980519980, 1.943111089, 0.215146262]), 1e-9)


# --- where they become torch's own optimizers -------------------------------------------------------------------------


def pairs_of(shape_list: list[tuple[int, ...]]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    drawn = [draw(shape, i) for i, shape in enumerate(shape_list)]
    return [nn.Parameter(t.clone()) for t in drawn], [nn.Parameter(t.clone()) for t in drawn]


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    for i, param in enumerate(params):
        param.grad = draw(tuple(param.shape), seed + i).to(param.dtype) * scale


@way
def test_lamb_that_adapts_and_decays_nothing_is_adam(way: str) -> None:
    mine, theirs = pairs_of([(3, 4), (5,), ()])
    ours, adam = Lamb(mine, lr=0.1, eps=1e-8, weight_decay=0.0, **WAYS[way]), torch.optim.Adam(theirs, lr=0.1, eps=1e-8)
    for step in range(5):
        for optimizer, params in ((ours, mine), (adam, theirs)):
            give_gradients(params, 100 * step)
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@way
def test_lars_with_everything_excluded_is_sgd_while_the_rate_stays(way: str) -> None:
    """SGD's momentum holds no rate and ours does: at a constant rate the two move alike."""
    mine, theirs = pairs_of([(3, 4), (5,), ()])
    ours = Lars([{"params": mine, "decay": False, "adapt": False}], lr=0.1, **WAYS[way])
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for step in range(5):
        for optimizer, params in ((ours, mine), (sgd, theirs)):
            give_gradients(params, 100 * step)
            optimizer.step()
    for param, a, b in zip(mine, mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            ours.state[param]["momentum_buffer"], 0.1 * sgd.state[b]["momentum_buffer"], rtol=1e-12, atol=0
        )


# --- what the ratios are for ------------------------------------------------------------------------------------------


@way
@both
def test_the_scale_of_the_gradients_does_not_matter_to_an_adapted_tensor(kind: Any, way: str) -> None:
    mine, theirs = pairs_of([(3, 4), (5, 2)])
    exact = {"weight_decay": 0.0, "eps": 0.0, **WAYS[way]}
    for params, scale in ((mine, 1.0), (theirs, 1000.0)):
        optimizer = kind([{"params": params, "adapt": True}], lr=0.1, **exact)
        for step in range(4):
            give_gradients(params, 100 * step, scale)
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@way
def test_lamb_moves_an_adapted_tensor_by_lr_of_its_own_length(way: str) -> None:
    params, before = pairs_of([(3, 4), (7, 2, 2)])
    optimizer = Lamb(params, lr=0.03, **WAYS[way])
    give_gradients(params, 5)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert float((param - old).detach().norm() / old.detach().norm()) == pytest.approx(0.03, rel=1e-12)


@way
def test_the_first_lars_step_is_at_most_lr_times_the_coefficient_of_a_tensors_length(way: str) -> None:
    params, before = pairs_of([(3, 4), (7, 2, 2)])
    optimizer = Lars(params, lr=2.0, lars_coeff=0.01, weight_decay=0.0, **WAYS[way])
    give_gradients(params, 5)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert float((param - old).detach().norm() / old.detach().norm()) == pytest.approx(0.02, rel=1e-12)


@way
@both
def test_the_reported_ratios_are_those_of_the_formulas(kind: Any, way: str) -> None:
    params = [nn.Parameter(draw((4, 3), i)) for i in range(3)]
    named = [("a.weight", params[0]), ("b.weight", params[1]), ("b.bias", params[2])]
    optimizer = kind(named, lr=0.1, **WAYS[way])
    assert optimizer.trust_ratios() is None
    references: list[Any] = [LarsTensor(array(p), 0.001, 0.0005) if kind is Lars else LambTensor(array(p), 0.01) for p in params]
    for step in range(2):
        give_gradients(params, 10 * step)
        for param, reference in zip(params, references, strict=True):
            reference.step(array(param.grad), 0.1)
        optimizer.step()
    ratios = optimizer.trust_ratios()
    a, b = references[0].ratio, references[1].ratio
    assert ratios.by_name == {"a.weight": pytest.approx(a, rel=1e-12), "b.weight": pytest.approx(b, rel=1e-12)}
    assert (ratios.min, ratios.max) == (pytest.approx(min(a, b)), pytest.approx(max(a, b)))
    assert ratios.median == pytest.approx((a + b) / 2)
    assert {ratios.layer_min, ratios.layer_max} == {"a.weight", "b.weight"} and len(ratios) == 2


# --- layouts, types, sizes --------------------------------------------------------------------------------------------


def of_odd_layouts(plain: list[Tensor]) -> list[nn.Parameter]:
    channels_last = plain[0].clone().to(memory_format=torch.channels_last)
    transposed = plain[1].t().contiguous().t()
    with_gaps = torch.stack([plain[2], plain[2]], dim=-1)[..., 0]
    found = [nn.Parameter(t) for t in (channels_last, transposed, with_gaps)]
    assert not any(p.is_contiguous() for p in found)
    return found


@way
@both
def test_the_layout_of_parameters_and_gradients_does_not_matter(kind: Any, way: str) -> None:
    plain = [draw((4, 3, 5, 5), 0), draw((6, 8), 1), draw((5, 9), 2)]
    results = []
    for odd_params, odd_grads in ((False, False), (True, False), (False, True), (True, True)):
        params = of_odd_layouts(plain) if odd_params else [nn.Parameter(t.clone()) for t in plain]
        optimizer = kind(params, lr=0.1, **WAYS[way])
        for step in range(3):
            grads = [draw(tuple(param.shape), 10 * step + i) for i, param in enumerate(params)]
            for param, grad in zip(params, of_odd_layouts(grads) if odd_grads else grads, strict=True):
                param.grad = grad.detach()
            optimizer.step()
        results.append([p.detach().contiguous() for p in params])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("channels_last", [False, True])
@both
def test_tensors_larger_than_a_block_are_cut_without_a_trace(
    kind: Any, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 16 elements, blocks of 64 and portions of 1024: tensors below, at and above each."""
    monkeypatch.setattr(list_ops, "ROW_ELEMENTS", 16)
    monkeypatch.setattr(list_ops, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(list_ops, "PORTION_ELEMENTS", 1024)
    sizes = [(3,), (64,), (65,), (13, 4, 5, 5), (1031,), (100, 7), (512,), (513,)]
    results = []
    for chosen in WAYS.values():
        params = [nn.Parameter(draw(size, i)) for i, size in enumerate(sizes)]
        if channels_last:
            params[3] = nn.Parameter(params[3].detach().to(memory_format=torch.channels_last))
        optimizer = kind([(f"{i}.weight", p) for i, p in enumerate(params)], lr=0.1, exclude_from_weight_decay=[], **chosen)
        for step in range(2):
            give_gradients(params, 10 * step)
            optimizer.step()
        results.append((params, optimizer.trust_ratios().by_name))
    (loop, loop_ratios), (listed, list_ratios) = results
    assert list_ratios == pytest.approx(loop_ratios, rel=1e-12) and len(list_ratios) == len(sizes)
    for a, b in zip(loop, listed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@both
def test_loop_and_lists_agree_in_float32_to_1e_6(kind: Any) -> None:
    results = []
    for chosen in WAYS.values():
        params = [nn.Parameter(draw(shape, i).float()) for i, shape in enumerate([(64, 64), (300, 17), (64,)])]
        optimizer = kind(params, lr=0.1, **chosen)
        for step in range(10):
            give_gradients(params, 10 * step)
            optimizer.step()
        results.append(params)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@way
@both
def test_a_16_bit_parameter_is_the_rounded_float32_run(kind: Any, way: str, dtype: torch.dtype) -> None:
    """Steps far below what 16 bits resolve are not lost: the float32 copy in the state keeps them."""
    start = [draw(shape, i).to(dtype) for i, shape in enumerate([(30, 20), (7,)])]
    narrow, wide = ([nn.Parameter(t.clone().to(kept)) for t in start] for kept in (dtype, torch.float32))
    ours, reference = (kind(params, lr=0.001, **WAYS[way]) for params in (narrow, wide))
    for step in range(20):
        for i, (a, b) in enumerate(zip(narrow, wide, strict=True)):
            a.grad = draw(tuple(a.shape), 10 * step + i).to(dtype)
            b.grad = a.grad.float()
        ours.step()
        reference.step()
    for a, b in zip(narrow, wide, strict=True):
        torch.testing.assert_close(a, b.to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(ours.state[a]["master"], b.detach(), rtol=0, atol=0)
        assert all(ours.state[a][name].dtype == torch.float32 for name in ours.moments)


@both
def test_what_other_code_writes_into_a_16_bit_parameter_counts(kind: Any) -> None:
    param = nn.Parameter(draw((4, 4), 0).bfloat16())
    optimizer = kind([param], lr=0.001)
    for step in range(3):
        give_gradients([param], step)
        optimizer.step()
    kept = optimizer.state[param]["master"].clone()
    with torch.no_grad():
        param[0, 0] = 5.0
    give_gradients([param], 9, scale=0.0)
    optimizer.param_groups[0]["lr"] = 0.0
    if kind is Lars:
        optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.step()
    kept[0, 0] = 5.0
    torch.testing.assert_close(optimizer.state[param]["master"], kept, rtol=0, atol=0)


@both
def test_no_parameter_is_too_small(kind: Any) -> None:
    params = [nn.Parameter(torch.zeros(0, 3, dtype=torch.float64)), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))]
    optimizer = kind([{"params": params, "adapt": True}], lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert params[0].shape == (0, 3) and params[1].isfinite()
