"""LARS and LAMB by their compiled kernels on a GPU: right, bit for bit again, in graphs, without waiting, in the pipeline.

Skipped without one; what a CPU can see of the same kernels, by Triton's interpreter, is in tests/unit/test_kernel*.py.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.user_loop.optimizer_hooks import refuse_before_step
from fleetx.optim import Lamb, Lars
from tests.helpers.gpu_steps import (
    CONVOLUTION,
    DEVICE,
    LOOP,
    RATES,
    assert_close,
    assert_equal_bits,
    capture,
    fresh,
    gradient,
    in_one_buffer,
    make,
    take_steps,
)
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
both = pytest.mark.parametrize("kind", [Lars, Lamb])
ROUNDING = 2e-6
"""Five steps in float32 against float64. A GPU's fast square root and division are right to two units in the last place."""


# --- right ----------------------------------------------------------------------------------------------------------------


@both
def test_five_steps_at_changing_rates_stay_beside_the_float64_loop(kind: Any) -> None:
    found, wanted = take_steps(kind), take_steps(kind, dtype=torch.float64, **LOOP)
    assert found[1]._kernels, "the kernels were not chosen"
    assert_close(found, wanted, within=ROUNDING)
    assert found[1].trust_ratios().by_name == pytest.approx(wanted[1].trust_ratios().by_name, rel=ROUNDING)
    assert found[1].trust_ratios().by_name["5.weight"] == 1.0


@both
def test_kernels_and_lists_agree_on_a_gpu(kind: Any) -> None:
    """torch's norms are float32 sums of another order."""
    assert_close(take_steps(kind), take_steps(kind, foreach=True), within=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@both
def test_16_bit_parameters_are_the_float32_copy_rounded_to_the_nearest(kind: Any, dtype: torch.dtype) -> None:
    params, optimizer = take_steps(kind, dtype=dtype, rounded=dtype)
    wanted = take_steps(kind, dtype=torch.float64, rounded=dtype, **LOOP)
    assert_close((params, optimizer), wanted, within=ROUNDING)
    for param in params:
        torch.testing.assert_close(param.detach(), optimizer.state[param]["master"].to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both
def test_gradients_at_odd_addresses_lead_to_the_same_steps(kind: Any, dtype: torch.dtype) -> None:
    """Narrower loads may put a sum's terms in another order."""
    plain = take_steps(kind, dtype=dtype, rounded=dtype)
    assert_close(take_steps(kind, dtype=dtype, rounded=dtype, views=in_one_buffer), plain, within=1e-6)


@both
def test_channels_last_is_another_order_in_memory_and_nothing_else(kind: Any) -> None:
    params, optimizer = take_steps(kind, channels_last=True)
    assert not params[CONVOLUTION].is_contiguous()
    assert_close((params, optimizer), take_steps(kind), within=1e-6)


@both
def test_new_gradients_at_each_step_are_found_where_they_are(kind: Any) -> None:
    """At addresses that other gradients had before, or none."""
    params = fresh(torch.float32, torch.float32)
    optimizer = make(kind, params, RATES[kind][0])
    in_the_way: list[Tensor] = []
    for number, rate in enumerate(RATES[kind]):
        for i, param in enumerate(params):
            param.grad = None
            if (i + number) % 3 == 0:
                in_the_way.append(torch.empty_like(param))
            param.grad = gradient(number, i, torch.float32).to(DEVICE)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    assert_equal_bits((params, optimizer), take_steps(kind))


@pytest.mark.parametrize("carry_norms", [False, True])
@pytest.mark.parametrize("give", [False, True])
def test_norms_that_are_known_change_nothing(carry_norms: bool, give: bool) -> None:
    def hand_over(params: list[nn.Parameter], optimizer: Any) -> None:
        if give:
            optimizer.take_gradient_norms(params, torch._foreach_norm([p.grad for p in params]))

    found = take_steps(Lars, before=hand_over, carry_norms=carry_norms)
    assert_close(found, take_steps(Lars), within=1e-6)


def test_a_kept_norm_is_dropped_when_other_code_writes_the_parameter() -> None:
    params, optimizer = take_steps(Lars, carry_norms=True)
    with torch.no_grad():
        params[0].mul_(2)
    wanted = params[0].detach().double().norm().item()
    optimizer.step()
    grad = params[0].grad.double().norm().item()  # type: ignore[union-attr]
    ratio = 0.001 * wanted / (grad + 0.0005 * wanted)
    assert optimizer.trust_ratios().by_name["0.weight"] == pytest.approx(ratio, rel=1e-5)


@both
def test_gradients_are_left_as_they_were_and_parameters_are_seen_to_change(kind: Any) -> None:
    params, optimizer = take_steps(kind, maximize=True)
    copies, versions = [p.grad.clone() for p in params], [p._version for p in params]  # type: ignore[union-attr]
    optimizer.step()
    for param, grad, version in zip(params, copies, versions, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0)
        assert param._version > version


# --- the same bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both
def test_two_runs_have_the_same_bits(kind: Any, dtype: torch.dtype) -> None:
    first = take_steps(kind, dtype=dtype, rounded=dtype)
    elsewhere = torch.empty(12345, device=DEVICE)  # other addresses the second time
    assert_equal_bits(take_steps(kind, dtype=dtype, rounded=dtype), first)
    del elsewhere


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both
def test_a_run_continued_from_a_saved_state_has_the_same_bits(kind: Any, dtype: torch.dtype, channels_last: bool) -> None:
    """Saved as checkpoints are: on the CPU, in the usual order of memory."""
    whole = take_steps(kind, dtype=dtype, rounded=dtype, channels_last=channels_last)
    params, first = take_steps(kind, dtype=dtype, rounded=dtype, channels_last=channels_last, rates=RATES[kind][:3])
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():
        state.update({name: value.cpu().contiguous() for name, value in state.items()})
    second = make(kind, params, 7.0)
    second.load_state_dict(saved)
    for number in (3, 4):
        for i, param in enumerate(params):
            assert param.grad is not None
            param.grad.copy_(gradient(number, i, dtype))
        second.param_groups[0]["lr"] = RATES[kind][number]
        second.step()
    assert_equal_bits((params, second), whole)


# --- graphs ---------------------------------------------------------------------------------------------------------------


@both
def test_a_captured_step_has_the_bits_of_an_eager_one(kind: Any) -> None:
    constant = [RATES[kind][2]] * 5
    found = take_steps(kind, rates=constant, in_graph=True)
    assert_equal_bits(found, take_steps(kind, rates=constant))


@both
def test_a_captured_step_follows_a_rate_that_is_a_tensor_on_the_device(kind: Any) -> None:
    eager = take_steps(kind, lr_on_device=True)
    replayed = take_steps(kind, lr_on_device=True, in_graph=True)
    assert_equal_bits(replayed, eager)
    assert replayed[1].trust_ratios().by_name == eager[1].trust_ratios().by_name
    assert_close(eager, take_steps(kind), within=1e-6)


@both
def test_a_rate_of_float32_on_the_device_serves_too(kind: Any) -> None:
    params = fresh(torch.float32, torch.float32)
    optimizer = make(kind, params, torch.tensor(0.25, device=DEVICE))
    plain = fresh(torch.float32, torch.float32)
    reference = make(kind, plain, 0.25)
    for some, theirs in ((params, optimizer), (plain, reference)):
        for i, param in enumerate(some):
            param.grad = gradient(0, i, torch.float32).to(DEVICE)
        theirs.step()
    assert_equal_bits((params, optimizer), (plain, reference))


@both
def test_an_eager_step_after_a_capture_uses_what_has_changed_since_the_eager_one_before(kind: Any) -> None:
    """The capture has seen new gradients and a new rate first; a graph keeps a table of its own."""

    def run(*, with_capture: bool) -> Any:
        params, optimizer = take_steps(kind, rates=[RATES[kind][0]] * 2)
        for i, param in enumerate(params):
            param.grad = gradient(7, i, torch.float32).to(DEVICE)
        optimizer.param_groups[0]["lr"] = RATES[kind][1]
        if with_capture:
            capture(optimizer)
        optimizer.step()
        return params, optimizer

    assert_equal_bits(run(with_capture=True), run(with_capture=False))


# --- without waiting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both
def test_a_step_never_waits_for_the_device(kind: Any, dtype: torch.dtype) -> None:
    """With kept gradients, with new ones, at another rate; the first steps make their plan. torch raises where a host waits."""
    params, optimizer = take_steps(kind, dtype=dtype, rounded=dtype, rates=RATES[kind][:2])
    others = [torch.ones_like(param) for param in params]
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        for param, other in zip(params, others, strict=True):
            param.grad = other
        optimizer.step()
        optimizer.param_groups[0]["lr"] = RATES[kind][3]
        optimizer.step()
        ratios = optimizer.trust_ratios()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ratios.min > 0


# --- in the pipeline ------------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    """Of odd sizes; the middle weight has several chunks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 129), nn.Tanh(), nn.Linear(129, 131), nn.LayerNorm(131), nn.Tanh(), nn.Linear(131, 5))


def distributed(part: str, settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = net()
    inner: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    if part == "lars":
        inner = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return fleet.distribute(model, inner, fleet.DistributedStrategy(**{part: True}, **settings))


def updates(model: nn.Module, ours: Any, steps: range) -> list[dict[str, float]]:
    ratios = []
    for step in steps:
        x, y = (t.to(fleet.device()) for t in batch(step))
        ratios.append(ours.minimize(F.cross_entropy(model(x), y)).trust_ratios.by_name)
    return ratios


def _train(rank: int, part: str, settings: dict[str, Any]) -> dict[str, Any]:
    model, ours = distributed(part, settings)
    odd: list[bool] = []
    given: list[bool] = []

    def look(update: Any, *_: Any) -> None:
        odd.append(any(p.grad.data_ptr() % 16 for p in model.parameters()))
        given.append(bool(getattr(update, "_given", None)))

    refuse_before_step(ours.update, look)  # it only looks: any other hook may change gradients, and no norm is handed over
    ratios = updates(model, ours, range(5))
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    return {"ratios": ratios, "weights": weights, "odd": odd, "given": given, "kernels": bool(ours.update._kernels)}


@pytest.mark.parametrize("settings", [{}, {"clip_norm": True, "clip_norm_configs": {"max_norm": 0.1}}], ids=["plain", "clipped"])
@pytest.mark.parametrize("part", ["lars", "lamb"])
def test_a_gpu_rank_reports_the_trust_ratios_of_a_cpu_rank(part: str, settings: dict[str, Any]) -> None:
    (on_cpu,) = run_ranks(_train, 1, part, settings, env={"FLEETX_DEVICE": "cpu"})
    (on_gpu,) = run_ranks(_train, 1, part, settings, env={"FLEETX_DEVICE": "cuda"})
    assert on_gpu["kernels"] and not on_cpu["kernels"]
    assert any(on_gpu["odd"]) and on_gpu["given"] == [part == "lars"] * 5
    for mine, right in zip(on_gpu["ratios"], on_cpu["ratios"], strict=True):
        assert set(mine) == {"0.weight", "2.weight", "5.weight"} and mine == pytest.approx(right, rel=1e-3)
    # LAMB as Adam: where a gradient is rounding noise, so is the direction of a full step.
    torch.testing.assert_close(on_gpu["weights"], on_cpu["weights"], rtol=0, atol=1e-3 if part == "lars" else 1e-2)


def _resumed(rank: int, part: str, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    def everything(model: nn.Module, ours: Any) -> list[Tensor]:
        state = [t for s in ours.state_dict()["state"].values() for t in s.values()]
        return [t.detach().cpu().clone() for t in (*model.state_dict().values(), *state)]

    model, ours = distributed(part, {})
    updates(model, ours, range(3))
    fleet.save_checkpoint(folder, step=3, model=model, optimizer=ours)
    updates(model, ours, range(3, 6))
    again, theirs = distributed(part, {})
    assert fleet.load_checkpoint(folder, model=again, optimizer=theirs) == (3, {})
    updates(again, theirs, range(3, 6))
    return everything(again, theirs), everything(model, ours)


@pytest.mark.parametrize("part", ["lars", "lamb"])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(part: str, tmp_path: Path) -> None:
    ((resumed, whole),) = run_ranks(_resumed, 1, part, str(tmp_path), env={"FLEETX_DEVICE": "cuda"})
    assert len(resumed) == len(whole)
    for mine, right in zip(resumed, whole, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)
