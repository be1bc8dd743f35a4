"""The kernels of LARS and LAMB, interpreted on a CPU: every step is the loop's, to seven digits, whatever tensors look like.

Chunks have 256 elements here. The interpreter rounds float32 to bfloat16 towards zero, and not to the nearest as a GPU does:
of bfloat16 parameters the float32 copy is compared, and the parameter to one unit in its last place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.optim import Lamb, Lars
from tests.helpers import kernel_interpreter
from tests.helpers.kernel_interpreter import CHUNK, assert_equal_bits, assert_same, both_ways, by_kernels, draw, drawn, take_steps

interpreted = kernel_interpreter.interpreted
pytestmark = pytest.mark.usefixtures("interpreted")
both = pytest.mark.parametrize("kind", [Lars, Lamb])
SIZES = [(3, CHUNK - 5), (1, CHUNK), (1, CHUNK + 1), (2, CHUNK), (1, 1), (0, 4), (5,)]
"""With a rest, one chunk, one more, two chunks, one element, none; and an excluded bias."""


def values(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [draw(*shape, seed=i) for i, shape in enumerate(shapes)]


# --- sizes and types ------------------------------------------------------------------------------------------------------


@both
def test_tensors_of_all_sizes_are_updated_as_by_the_loop(kind: Any) -> None:
    found, wanted = both_ways(kind, values(*SIZES), rates=(0.1, 0.3, 0.02))
    assert_same(found, wanted)
    assert found.ratios[0] is not None
    assert list(found.ratios[0].by_name) == [f"{i}.weight" for i in range(6)] and found.ratios[0].by_name["5.weight"] == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@both
def test_16_bit_parameters_are_the_rounded_float32_copy_that_training_moves(kind: Any, dtype: torch.dtype) -> None:
    found, wanted = both_ways(kind, values((2, CHUNK - 5), (1, 7), (5,)), dtype=dtype)
    assert_same(found, wanted)
    unit = torch.finfo(dtype).eps if dtype is torch.bfloat16 else 0.0
    for param in found.params:
        master = found.optimizer.state[param]["master"]
        assert param.dtype is dtype and master.dtype is torch.float32 and not torch.equal(master, param.float())
        torch.testing.assert_close(param.detach().float(), master.to(dtype).float(), rtol=unit, atol=0)


@both
def test_a_16_bit_parameter_written_by_other_code_counts_for_what_was_written(kind: Any) -> None:
    def write(step: int, optimizer: Any) -> None:
        if step == 1:
            optimizer.param_groups[0]["params"][0].data[0, :100] = 3.0

    found = take_steps(kind, values((1, CHUNK + 9)), fused=True, dtype=torch.float16, before=write)
    wanted = take_steps(kind, values((1, CHUNK + 9)), fused=False, dtype=torch.float16, before=write)
    assert_same(found, wanted)
    assert found.params[0][0, 50].item() == pytest.approx(3.0, abs=0.2)


@both
def test_types_may_be_mixed_in_one_group(kind: Any) -> None:
    types = [torch.float32, torch.float16, torch.bfloat16]
    runs = []
    for fused in (True, False):
        params = [nn.Parameter(draw(1, CHUNK + 2, seed=i).to(dtype)) for i, dtype in enumerate(types)]
        optimizer = kind([(f"{p.dtype}", p) for p in params], lr=0.1, **({} if fused else kernel_interpreter.LOOP))
        optimizer = by_kernels(optimizer) if fused else optimizer
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        runs.append(kernel_interpreter.Run(params, optimizer, [optimizer.trust_ratios()]))
    assert_same(*runs)


@pytest.mark.parametrize("chunks", [1, 1024, 1025, 2100])
def test_a_norm_is_the_sum_over_however_many_chunks(chunks: int) -> None:
    """1024 are added at a time: |p|^2 = 1 + 2 + ... + n and |g|^2 = n here. What follows is another tensor's."""
    from fleetx.optim.kernels.common import GROUP_NUMBERS, ROW_WORDS, SCALES
    from fleetx.optim.kernels.lars import lars_settle
    from fleetx.optim.kernels.plan import COLUMN

    row, settings = torch.zeros(ROW_WORDS, dtype=torch.int64), torch.zeros(GROUP_NUMBERS, dtype=torch.float64)
    row[COLUMN["chunks"]], row[COLUMN["decayed"]] = chunks, 1
    settings[:6] = torch.tensor([0.1, 0.9, 0.25, 0.5, 0.0, 1.0])
    table, first_tensor = torch.cat([row, settings.view(torch.int64)]), torch.zeros(1, dtype=torch.int64)
    weight_sums, grad_sums = torch.arange(1.0, chunks + 8.0), torch.ones(chunks + 7)
    weight_sums[chunks:] = grad_sums[chunks:] = 1e9
    ratios, scales = torch.zeros(1), torch.zeros(SCALES)
    lars_settle[(1,)](first_tensor, table, weight_sums, grad_sums, scales, ratios, 1, True)
    weight, grad = (chunks * (chunks + 1) / 2) ** 0.5, chunks**0.5
    ratio = 0.5 * weight / (grad + 0.25 * weight)
    assert ratios.item() == pytest.approx(ratio, rel=1e-6) and scales[0].item() == pytest.approx(0.1 * ratio, rel=1e-6)


def test_an_empty_tensor_beside_small_ones_has_the_ratio_one() -> None:
    """No tensor has several chunks: LARS then needs no launch that computes ratios."""
    found = take_steps(Lars, values((1, 3), (0, 4)), fused=True, rates=[0.1] * 2)
    for ratios in found.ratios:
        assert ratios is not None and ratios.by_name["1.weight"] == 1.0


# --- groups and settings --------------------------------------------------------------------------------------------------


@both
def test_each_group_has_its_own_rate_decay_and_overrides(kind: Any) -> None:
    def groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        return [
            {"params": named[:1], "times": 3.0, "weight_decay": 0.3},
            {"params": named[1:2], "adapt": False},
            {"params": named[2:3], "decay": False, "times": 0.5},
            {"params": named[3:], "decay": True, "adapt": True},
        ]

    found, wanted = both_ways(kind, values((1, CHUNK + 9), (1, CHUNK + 9), (1, CHUNK + 9), (6,), (CHUNK + 1,)), groups=groups)
    assert_same(found, wanted)
    not_decayed = ["2.weight"] if kind is Lars else []  # what LAMB does not decay it does not adapt either
    assert found.ratios[0] is not None and list(found.ratios[0].by_name) == ["0.weight", *not_decayed, "3.bias", "4.bias"]


@both
def test_settings_changed_between_steps_count_from_the_next(kind: Any) -> None:
    def change(step: int, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        group["momentum" if kind is Lars else "betas"] = (0.8, 0.5)[step] if kind is Lars else ((0.8, 0.9), (0.5, 0.99))[step]
        group["eps" if kind is Lamb else "epsilon"] = (1e-3, 0.1)[step]
        group[optimizer.decay_key] = (0.1, 0.4)[step]

    assert_same(*both_ways(kind, values((1, CHUNK + 9), (4,)), before=change))


@both
def test_maximize_goes_the_other_way_and_may_be_one_groups_alone(kind: Any) -> None:
    def groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        return [{"params": named[:2], "maximize": True}, {"params": named[2:]}]

    assert_same(*both_ways(kind, values((1, CHUNK + 9), (1, 8), (1, 8)), groups=groups))


@pytest.mark.parametrize("always_adapt", [False, True])
def test_lamb_without_decay_adapts_where_it_is_told_to(always_adapt: bool) -> None:
    options = {"lamb_weight_decay": 0.0, "always_adapt": always_adapt}
    found, wanted = both_ways(Lamb, values((1, CHUNK + 9), (4,)), **options)
    assert_same(found, wanted)
    assert (found.ratios[0] is not None) == always_adapt


def test_lars_without_momentum_is_the_loops_too() -> None:
    assert_same(*both_ways(Lars, values((1, CHUNK + 9)), momentum=0.0, epsilon=0.01))


@both
def test_a_rate_in_a_tensor_on_the_cpu_counts_as_its_number(kind: Any) -> None:
    """Also when the same tensor holds another number at the next step."""
    plain = take_steps(kind, values((1, CHUNK + 9)), fused=True, rates=[0.25, 0.5])
    rate = torch.tensor(0.25, dtype=torch.float64)

    def change(step: int, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = rate.fill_((0.25, 0.5)[step])

    assert_equal_bits(take_steps(kind, values((1, CHUNK + 9)), fused=True, before=change), plain)


# --- gradients ------------------------------------------------------------------------------------------------------------


@both
def test_parameters_without_gradients_are_left_alone_and_not_counted(kind: Any) -> None:
    """Each set of gradients has its own plan; the last step finds the first one again."""
    has_gradient = [{0, 1, 2}, {0, 2}, {1}, set(), {0, 1, 2}]

    def gradients(step: int, i: int, param: nn.Parameter) -> Tensor | None:
        return drawn(step, i, param) if i in has_gradient[step] else None

    found, wanted = both_ways(kind, values((1, CHUNK + 9), (1, 3), (4,)), gradients=gradients, rates=[0.1] * 5)
    assert_same(found, wanted)
    assert [ratios and list(ratios.by_name) for ratios in found.ratios] == [
        ["0.weight", "1.weight"], ["0.weight"], ["1.weight"], None, ["0.weight", "1.weight"],
    ]  # fmt: skip
    if kind is Lamb:
        assert [float(found.tensors(i)["step"]) for i in range(3)] == [3.0, 3.0, 3.0]


@both
def test_a_parameter_that_gets_its_first_gradient_late_starts_its_own_count(kind: Any) -> None:
    def gradients(step: int, i: int, param: nn.Parameter) -> Tensor | None:
        return drawn(step, i, param) if i == 0 or step > 0 else None

    found, wanted = both_ways(kind, values((1, CHUNK + 9), (1, CHUNK + 3)), gradients=gradients, rates=[0.1] * 3)
    assert_same(found, wanted)
    if kind is Lamb:
        assert [float(found.tensors(i)["step"]) for i in range(2)] == [3.0, 2.0]


@both
def test_zero_parameters_and_zero_gradients_have_the_ratio_one(kind: Any) -> None:
    def gradients(step: int, i: int, param: nn.Parameter) -> Tensor:
        return torch.zeros_like(param) if i in (1, 3) else drawn(step, i, param)

    zeros = [torch.zeros(1, CHUNK + 9), draw(1, CHUNK + 9), torch.zeros(1, 7), draw(1, 7)]
    found, wanted = both_ways(kind, zeros, gradients=gradients, rates=[0.1])
    assert_same(found, wanted)
    assert found.ratios[0] is not None
    ones = [name for name, ratio in found.ratios[0].by_name.items() if ratio == 1.0]
    assert ones == (["0.weight", "1.weight", "2.weight", "3.weight"] if kind is Lars else ["0.weight", "2.weight"])


@both
def test_parameters_in_channels_last_take_gradients_of_either_order(kind: Any) -> None:
    turned = [draw(6, 5, 3, 3, seed=i).to(memory_format=torch.channels_last) for i in range(2)]

    def gradients(step: int, i: int, param: nn.Parameter) -> Tensor:
        grad = drawn(step, i, param)
        return grad.contiguous(memory_format=torch.channels_last) if i % 2 else grad

    found, wanted = both_ways(kind, [*turned, draw(6, 5, 3, 3, seed=2), draw(6, 5, 3, 3, seed=3)], gradients=gradients)
    assert not found.params[0].is_contiguous() and found.params[2].is_contiguous()
    assert_same(found, wanted)


@both
def test_gradients_may_be_slices_transposed_or_expanded(kind: Any) -> None:
    def gradients(step: int, i: int, param: nn.Parameter) -> Tensor:
        if i == 0:
            return drawn(step, i, nn.Parameter(torch.empty(13, 66)))[:, ::3]
        return draw(22, 13, seed=step).t() if i == 1 else draw(1, 22, seed=step).expand(13, 22)

    assert_same(*both_ways(kind, values((13, 22), (13, 22), (13, 22)), gradients=gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@both
def test_gradients_may_begin_at_any_address(kind: Any, dtype: torch.dtype) -> None:
    """As in a reducer's flat buffer; the next step's are aligned again."""
    shapes = [(1, 3), (1, CHUNK + 9), (1, 6)]

    def apart(step: int, i: int, param: nn.Parameter) -> Tensor:
        return drawn(step, i, param).to(dtype)

    def in_one_buffer(optimizer: Any) -> None:
        params = optimizer.param_groups[0]["params"]
        buffer, place = torch.zeros(sum(p.numel() for p in params) + 1, dtype=dtype), 1
        for param in params:
            view = buffer[place : place + param.numel()].view_as(param).copy_(param.grad)
            param.grad, place = view, place + param.numel()
        assert any(param.grad.data_ptr() % 16 for param in params)

    plain = take_steps(kind, values(*shapes), fused=True, dtype=dtype, gradients=apart)
    odd = take_steps(
        kind,
        values(*shapes),
        fused=True,
        dtype=dtype,
        gradients=apart,
        before=lambda step, optimizer: in_one_buffer(optimizer) if step == 0 else None,
    )
    assert_equal_bits(odd, plain)


@pytest.mark.parametrize("maximize", [False, True])
@both
def test_gradients_are_left_as_they_were_and_parameters_are_seen_to_change(kind: Any, maximize: bool) -> None:
    seen: dict[int, tuple[Tensor, Tensor, int]] = {}

    def look(step: int, optimizer: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            seen[id(param)] = param.grad, param.grad.clone(), param._version

    found = take_steps(kind, values((1, CHUNK + 9), (2, 3), (4,)), fused=True, before=look, maximize=maximize)
    for param in found.params:
        grad, copy, version = seen[id(param)]
        assert param.grad is grad and param._version > version
        torch.testing.assert_close(grad, copy, rtol=0, atol=0)


@both
def test_autograd_refuses_what_the_step_has_overwritten(kind: Any) -> None:
    weight = nn.Parameter(draw(3, 3))
    optimizer = by_kernels(kind([("w", weight)], lr=0.1))
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
