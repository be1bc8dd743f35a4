"""Recompute changes nothing: losses, gradients, weights, buffers and random numbers are those of training without, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fleetx import fleet
from fleetx.applications import Bert_base, Resnet20
from fleetx.engine.modules.patching import patch_of
from tests.helpers.recompute_nets import NETS, Chain, Inner, Mixed, Net, Norm, call_three_times, in_float32
from tests.helpers.recompute_runs import (
    Loop,
    assert_ran_again,
    assert_same,
    distribute,
    evaluated_before_backward,
    loss_of,
    random_now,
    rows,
    same_in_loop,
    seed,
    train,
)

AMP: dict[str, dict[str, Any]] = {
    "bfloat16": {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
    "float16": {"amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 256.0}},
}
LARGE = ["convolutions", "u-net", "torch transformer", "encoder and decoder"]
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
STATEFUL = ["called three times", "counting buffer", "replaced buffer", "spectral norm", "python and numpy"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def equal_with_and_without(net: Net, **settings: Any) -> None:
    without, ours = train(net, False, **settings), train(net, True, **settings)
    assert_same(ours, without)
    assert_ran_again(ours, without)


# --- every net --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_five_updates_with_recompute_are_those_without(name: str, alone: None) -> None:
    equal_with_and_without(NETS[name])


@pytest.mark.parametrize("dtype", AMP)
@pytest.mark.parametrize("name", [*LARGE, "arguments", "own checkpoint", *STATEFUL])
def test_under_autocast_too(name: str, dtype: str, alone: None) -> None:
    equal_with_and_without(NETS[name], **AMP[dtype])


@pytest.mark.parametrize("name", [*LARGE, *STATEFUL])
def test_with_two_micro_batches_an_update_too(name: str, alone: None) -> None:
    equal_with_and_without(NETS[name], merged=2, **MERGED)


@pytest.mark.parametrize(
    "strategy",
    [
        {"lars": True, "lars_configs": {"lars_coeff": 0.1}},
        {"clip_norm": True, "clip_norm_configs": {"max_norm": 0.1}},
        AMP["float16"] | MERGED | {"lars": True, "lars_configs": {"lars_coeff": 0.1}},
    ],
    ids=["lars", "clip_norm", "float16 merged lars"],
)
def test_beside_other_strategies_too(strategy: dict[str, Any], alone: None) -> None:
    equal_with_and_without(NETS["convolutions"], merged=2 if "gradient_merge" in strategy else 1, **strategy)


def test_a_frozen_unit_on_frozen_inputs_is_not_computed_again(alone: None) -> None:
    ours = train(NETS["frozen"], True)
    assert [ours.runs[f"units.{index}"] for index in range(4)] == [5, 10, 10, 10]


def test_a_unit_called_three_times_runs_six_times_and_its_norm_counts_three(alone: None) -> None:
    ours = train(NETS["called three times"], True, updates=2)
    assert ours.runs["unit"] == 12
    assert [int(state["unit.norm.num_batches_tracked"]) for state in ours.states] == [3, 6]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_unit_inside_the_users_own_checkpoint_trains_to_the_same_bits(reentrant: bool, alone: None) -> None:
    net = Net(lambda: Chain(Inner(), lambda unit, x: checkpoint(unit, x, use_reentrant=reentrant)), ("unit",))
    assert_same(train(net, True), train(net, False))


@pytest.mark.parametrize("dtype", AMP)
@pytest.mark.parametrize(
    ("net", "black"),
    [
        (Net(lambda: Chain(Mixed()), ("unit",)), []),
        (Net(lambda: Chain(Inner(), in_float32), ("unit",)), []),
        (Net(lambda: Chain(nn.Sequential(Inner())), ("unit.0",)), ["unit"]),
    ],
    ids=["inside the unit", "around the unit", "a listed module around the unit"],
)
def test_a_stretch_kept_in_float32_under_autocast_stays_so(net: Net, black: list[str], dtype: str, alone: None) -> None:
    equal_with_and_without(net, amp=True, amp_configs={"dtype": dtype, "custom_black_list": black})


@pytest.mark.parametrize("black", ["unit", "unit.enter", "Linear"])
def test_a_unit_kept_in_float32_by_name_or_a_part_of_it_is_computed_again_so(black: str, alone: None) -> None:
    net = Net(lambda: Chain(Inner(), call_three_times), ("unit",))
    equal_with_and_without(net, amp=True, amp_configs={"dtype": "bfloat16", "custom_black_list": [black]})


# --- our applications -------------------------------------------------------------------------------------------------------


def _bert_batch(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1, 23, (3, 9), generator=generator)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    labels = torch.where(torch.rand(3, 9, generator=generator) < 0.4, ids, -100)
    return {
        "input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask,
        "labels": labels, "next_sentence_label": torch.arange(3) % 2,
    }  # fmt: skip


def _image_batch(index: int) -> tuple[Tensor, Tensor]:
    x, y = rows(index, 4)
    return x.view(4, 1, 2, 4).repeat(1, 3, 4, 2), y


@pytest.mark.parametrize("dtype", [None, *AMP])
@pytest.mark.parametrize("model", ["bert", "resnet"])
def test_our_bert_and_resnet_train_to_the_same_bits(model: str, dtype: str | None, alone: None) -> None:
    tiny = {"hidden": 12, "layers": 2, "heads": 3, "feed_forward": 20, "vocab_size": 23, "max_position": 16}
    found = []
    for recompute in (None, []):
        seed()
        built: Any = Bert_base(**tiny) if model == "bert" else Resnet20(num_classes=4, image_size=8)
        built, optimizer = distribute(built, recompute, torch.optim.Adam(built.parameters(), lr=0.01), **AMP.get(dtype or "", {}))
        losses = []
        for step in range(5):
            loss = built.loss(_bert_batch(step) if model == "bert" else _image_batch(step))
            losses.append(loss.detach())
            optimizer.minimize(loss)
        found.append((losses, dict(built.state_dict()), random_now()))
        del optimizer
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=0, atol=0)
    assert found[0][2] == found[1][2]


# --- ways to write the loop -------------------------------------------------------------------------------------------------


def same_loop(loop: Loop, build: Callable[[], nn.Module] = lambda: Chain(Norm(), call_three_times)) -> None:
    same_in_loop(build, loop)


def _bare_backward(model: Any, optimizer: Any) -> None:
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def _retained_but_not_used_again(model: Any, optimizer: Any) -> None:
    for step in range(3):
        optimizer.minimize(loss_of(model, step), retain_graph=True)


def _evaluated_between_steps(model: Any, optimizer: Any) -> None:
    for step in range(3):
        optimizer.minimize(loss_of(model, step))
        model.eval()
        with torch.no_grad():
            loss_of(model, 10 + step)
        loss_of(model, 20 + step)  # a graph that is never used
        model.train()
        with torch.no_grad():
            loss_of(model, 30 + step)  # counts in the running statistics


def _several_forwards_before_backward(model: Any, optimizer: Any) -> None:
    for step in range(0, 9, 3):
        losses = [loss_of(model, step + i) for i in range(3)]
        loss_of(model, 100)  # never used
        optimizer.minimize(losses[1] + losses[0] * 0.5 - losses[2] * 0.1)


def _random_numbers_between_forward_and_backward(model: Any, optimizer: Any) -> None:
    for step in range(3):
        loss = loss_of(model, step)
        torch.rand(7)
        optimizer.minimize(loss)
        torch.rand(3)


@pytest.mark.parametrize(
    "loop",
    [
        _bare_backward,
        _retained_but_not_used_again,
        _evaluated_between_steps,
        evaluated_before_backward,
        _several_forwards_before_backward,
        _random_numbers_between_forward_and_backward,
    ],
)
def test_a_loop_of_another_form_ends_with_the_same_bits(loop: Loop, alone: None) -> None:
    same_loop(loop)


def test_a_forward_hook_and_a_pre_hook_on_a_unit_are_called_once_a_call(alone: None) -> None:
    seen: list[str] = []

    def hooked() -> nn.Module:
        model = Chain(Inner())
        model.unit.register_forward_pre_hook(lambda module, args: (seen.append("before"), (args[0] * 2,))[1])
        model.unit.register_forward_hook(lambda module, args, out: (seen.append("after"), out + args[0])[1])
        return model

    same_loop(_bare_backward, hooked)
    assert seen == ["before", "after"] * 6  # three steps without recompute, three with


def test_a_deep_copy_is_plain_and_can_be_distributed_itself(alone: None) -> None:
    model, optimizer = distribute(Chain(Norm()), ["unit"])
    optimizer.minimize(loss_of(model, 0))
    twin = copy.deepcopy(model)
    assert patch_of(model.unit) is not None and "forward" not in vars(twin.unit)
    weights = [p.clone() for p in model.parameters()]
    same_loop(_bare_backward, lambda: copy.deepcopy(twin))
    torch.testing.assert_close(list(model.parameters()), weights, rtol=0, atol=0)
    copied, theirs = distribute(twin, ["unit"])
    for step in range(3):  # both pairs side by side
        seed(step)
        optimizer.minimize(loss_of(model, step))
        seed(step)
        theirs.zero_grad()
        theirs.minimize(loss_of(copied, step))
    assert int(copied.unit.norm.num_batches_tracked) == int(model.unit.norm.num_batches_tracked) == 4


def test_a_model_distributed_a_second_time_is_patched_once(alone: None) -> None:
    runs: list[int] = []

    def again(model: Any, optimizer: Any) -> None:
        optimizer.minimize(loss_of(model, 0))

    seed()
    model = Chain(Inner(lambda unit, x: (runs.append(1), x)[1]))
    for recompute in (["unit"], None, ["unit"]):
        model, optimizer = distribute(model, recompute)
        runs.clear()
        again(model, optimizer)
        assert len(runs) == (1 if recompute is None else 2)
        del optimizer


def test_the_model_says_nothing_of_it_in_its_names_class_or_state(alone: None) -> None:
    model = Chain(Norm())
    keys = list(model.state_dict())
    distributed, _ = distribute(model, [])
    assert distributed is model and type(model.unit) is Norm and list(model.state_dict()) == keys
    assert fleet.DistributedStrategy(recompute=True).recompute_configs["checkpoints"] == []
