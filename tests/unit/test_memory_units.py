"""Which units a budget finds in nets of many shapes: by running them, none inside another, with names and classes left alone."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.applications import Bert_base, Resnet20
from tests.helpers.budget_runs import assert_equal, bounds, cross_entropy, distribute, everything
from tests.helpers.recompute_nets import NETS, WIDTH, Inner
from tests.helpers.recompute_runs import rows, seed

pytestmark = pytest.mark.usefixtures("alone")


# --- nets ---------------------------------------------------------------------------------------------------------------------


class TorchEncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Transformer(16, 2, 3, 3, 32, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 16).view(len(x), -1, 16)
        return self.head(self.body(x, x.flip(1))).mean(1)


class Shared(nn.Module):
    """One block in two places of a list, and once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        one = Inner()
        self.blocks, self.other, self.last = nn.ModuleList([one, Inner(), one]), one, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(self.other(x))


class InDictionaries(nn.Module):
    """Blocks that are given a dictionary and return one."""

    class Block(Inner):
        def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
            return {"hidden": super().forward(state["hidden"]), "skips": [*state["skips"], state["hidden"]]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(self.Block() for _ in range(3)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"hidden": x, "skips": []}
        for block in self.blocks:
            state = block(state)
        return self.last(state["hidden"] + sum(state["skips"]))


class Reads(nn.Module):
    """It goes through a Sequential by itself, to see every layer's result: the Sequential is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = conv_bn_relu(6), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, seen = image(x), 0.0
        for layer in self.layers:
            x = layer(x)
            seen = seen + x.mean((2, 3))
        return self.last(seen)


class Image(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return image(x)


def image(x: Tensor) -> Tensor:
    return x.view(-1, 1, 2, 4).repeat(1, 4, 2, 1)


def conv_bn_relu(times: int, *, inplace: bool = True) -> nn.Sequential:
    kinds = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=inplace)) for _ in range(times)]
    return nn.Sequential(*(layer for three in kinds for layer in three))


def flat() -> nn.Sequential:
    return nn.Sequential(Image(), *conv_bn_relu(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


def begins_in_place() -> nn.Sequential:
    """Blocks whose first layer changes their input: they cannot be computed again as they are."""
    wide = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in range(3)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *wide, nn.Linear(WIDTH, 4))


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    units: set[str] | None
    """None: not predicted here. None at all where each layer by itself keeps as much as it frees."""


CASES: dict[str, Case] = {
    "convolutions": Case(NETS["convolutions"].build, {"blocks.0", "blocks.1"}),
    "u-net": Case(NETS["u-net"].build, {"down1", "down2", "middle", "up2", "up1"}),
    "transformer": Case(NETS["torch transformer"].build, {"layers.0", "layers.1"}),
    "encoder and decoder": Case(NETS["encoder and decoder"].build, {"encoder.0", "encoder.1", "decoder.0", "decoder.1"}),
    "torch's encoder and decoder": Case(TorchEncoderDecoder, None),
    "dictionaries": Case(InDictionaries, {"blocks.0", "blocks.1", "blocks.2"}),
    "called three times": Case(NETS["called three times"].build, {"unit"}),
    "shared": Case(Shared, {"blocks.0", "blocks.1"}),
    "layers in a row": Case(flat, None),
    "layers in a row, read one by one": Case(Reads, set()),
    "begins in place": Case(begins_in_place, set()),
}


def found_units(model: nn.Module, batch: Any, **settings: Any) -> tuple[str, ...]:
    return tuple(as_module(name) for name in distribute(model, "1GB", batch, **settings)[1].memory_plan.units)


def as_module(name: str) -> str:
    """A slice of one module is that module."""
    found = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name)
    return name if found is None or int(found[3]) - int(found[2]) > 1 else f"{found[1]}.{found[2]}".lstrip(".")


def assert_apart(model: nn.Module, units: tuple[str, ...]) -> None:
    assert len(set(units)) == len(units)
    called = {name: model.get_submodule(name) for name in units if "[" not in name}
    for name, module in called.items():
        inside = {id(part) for part in module.modules()}
        assert not any(id(other) in inside for key, other in called.items() if key != name), name


# --- which ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_units_are_found_none_inside_another_and_the_model_keeps_its_class_and_names(name: str) -> None:
    case = CASES[name]
    seed()
    model = case.build()
    kind, keys, modules = type(model), list(model.state_dict()), [key for key, _ in model.named_modules()]
    units = found_units(model, rows(0, 256))
    assert units if case.units is None else set(units) == case.units
    assert_apart(model, units)
    assert type(model) is kind and list(model.state_dict()) == keys and [key for key, _ in model.named_modules()] == modules


def test_of_our_resnet_they_are_its_residual_blocks_in_the_order_of_forward() -> None:
    model = Resnet20(num_classes=4, image_size=16)
    batch = torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,))
    assert found_units(model, batch, loss_fn=None) == tuple(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3))


def test_of_our_bert_they_are_its_layers() -> None:
    model = Bert_base(hidden=24, layers=6, heads=3, feed_forward=48, vocab_size=50, max_position=32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 50, (8, 32), generator=generator)
    labels = torch.where(torch.rand(8, 32, generator=generator) < 0.2, tokens, -100)
    batch = {"input_ids": tokens, "token_type_ids": torch.zeros_like(tokens), "attention_mask": torch.ones_like(tokens)}
    batch |= {"labels": labels, "next_sentence_label": torch.randint(0, 2, (8,), generator=generator)}
    units = found_units(model, batch, loss_fn=None)
    layers = {name for name, module in model.named_modules() if type(module).__name__.endswith("Layer") and name[-1].isdigit()}
    assert len(layers) == 6 and layers <= set(units)


def test_a_row_of_single_layers_is_cut_into_slices_that_do_not_begin_with_a_change_in_place() -> None:
    model = flat()
    units = found_units(model, rows(0, 256))
    ranges = [tuple(int(end) for end in name.strip("[]").split(":")) for name in units]
    assert len(ranges) >= 4 and all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    starts = [first for first, _ in ranges]
    assert not any(isinstance(model[first], nn.ReLU) for first in starts)
    covered = {i for first, end in ranges for i in range(first, end)}
    assert sum(isinstance(model[i], nn.Conv2d | nn.BatchNorm2d) for i in covered) >= 14  # of 16


@pytest.mark.parametrize(
    "name", ["convolutions", "u-net", "encoder and decoder", "torch's encoder and decoder", "layers in a row"]
)
def test_most_of_what_is_saved_is_saved_inside_of_units(name: str) -> None:
    """By hooks of this test: bytes of different storages that autograd saves, inside of units and at all."""
    seed()
    model, batch = CASES[name].build(), rows(0, 256)
    units = found_units(copy.deepcopy(model), batch)
    inside, everywhere = {}, {}
    depth = [0]
    for unit in units:
        first, last = (unit, unit) if "[" not in unit else (unit.strip("[]").split(":")[0], str(int(unit[:-1].split(":")[1]) - 1))
        model.get_submodule(first).register_forward_pre_hook(lambda *_: depth.__setitem__(0, depth[0] + 1))
        model.get_submodule(last).register_forward_hook(lambda *_: depth.__setitem__(0, depth[0] - 1))
    older = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers(), *batch)}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in older:
            everywhere[place] = tensor.untyped_storage().nbytes()
            if depth[0]:
                inside[place] = everywhere[place]
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cross_entropy(model, batch)
    del loss
    share = sum(inside.values()) / sum(everywhere.values())
    print(f"FIGURE {name} {share:.3f}")
    assert share >= 0.7


# --- and they can be computed again -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shared", "dictionaries", "layers in a row"])
def test_training_by_the_smallest_budget_is_training_without_one(name: str) -> None:
    build, batch = CASES[name].build, rows(7, 128)
    seed()
    least, _ = bounds(build, batch)
    found = []
    for budget in (int(1.05 * least), None):
        seed()
        model, optimizer = distribute(build(), budget, batch)
        assert budget is None or optimizer.memory_plan.recomputed
        for index in range(3):
            optimizer.minimize(cross_entropy(model, rows(index, 128)))
        found.append(everything(model, optimizer))
        del model, optimizer
    assert_equal(*found)


@pytest.mark.parametrize("name", ["layers in a row", "u-net"])
def test_a_copy_of_a_planned_model_is_a_plain_one_with_weights_of_its_own(name: str) -> None:
    build, batch = CASES[name].build, rows(7, 128)
    seed()
    least, _ = bounds(build, batch)
    model, optimizer = distribute(build(), int(1.05 * least), batch)
    twin = copy.deepcopy(model)
    assert not any("forward" in vars(module) and vars(module)["forward"] is vars(own).get("forward")
                   for module, own in zip(twin.modules(), model.modules(), strict=True))  # fmt: skip
    seed()
    theirs = cross_entropy(model, batch)
    seed()
    ours = cross_entropy(twin, batch)
    assert torch.equal(ours, theirs)
    ours.backward()
    assert all(p.grad is not None for p in twin.parameters()) and all(p.grad is None for p in model.parameters())
    optimizer.minimize(theirs)
    assert not all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
