"""Which modules recompute takes, how it refuses names, and what it says of a unit that cannot be computed again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fleetx as X
from fleetx import fleet
from fleetx.errors import ConfigError, FleetError
from fleetx.recompute.units import chosen_units
from tests.helpers.recompute_nets import WIDTH, Chain, ConvNet, EncoderDecoder, Inner, TorchTransformer, UNet
from tests.helpers.recompute_runs import Trace, count_runs, distribute, rows

KEY = 'recompute_configs["checkpoints"]'


def chosen(model: nn.Module, *wanted: str) -> list[str]:
    found = chosen_units(model, wanted)
    assert all(model.get_submodule(name) is module for name, module in found.items())
    return list(found)


def loss_of(model: nn.Module, index: int = 0) -> Tensor:
    x, y = rows(index)
    return F.cross_entropy(model(x), y)


# --- by name ----------------------------------------------------------------------------------------------------------------


def test_names_and_patterns_are_taken_in_the_models_order_each_module_once() -> None:
    model = EncoderDecoder()
    assert chosen(model, "decoder.1", "encoder.0") == ["encoder.0", "decoder.1"]
    assert chosen(model, "encoder.*", "encoder.1") == ["encoder.0", "encoder.1"]
    assert chosen(model, "*coder.[01]") == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert chosen(model, "decoder.?.cross") == ["decoder.0.cross", "decoder.1.cross"]


def test_of_the_modules_that_patterns_match_the_outermost_are_taken() -> None:
    model = EncoderDecoder()
    assert chosen(model, "decoder.*") == ["decoder.0", "decoder.1"]
    assert chosen(model, "*.cross", "decoder.1") == ["decoder.0.cross", "decoder.1"]
    assert chosen(nn.Sequential(Inner(), nn.Tanh()), "*") == ["0", "1"]
    # `1` is no parent of `10`, though its name begins so.
    assert chosen(nn.Sequential(*(Inner() for _ in range(11))), "1", "10") == ["1", "10"]


@pytest.mark.parametrize(
    "wanted", [["decoder.0", "decoder.0.own"], ["decoder.0.own", "decoder.0"], ["decoder.0.own", "decoder.*"]]
)
def test_a_module_named_beside_one_that_it_is_a_part_of_is_refused(wanted: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"names both `decoder\.0` and `decoder\.0\.own`, which is a part of it"):
        chosen(EncoderDecoder(), *wanted)


@pytest.mark.parametrize(
    ("entry", "hint"),
    [("decoder.0.crosss", " Did you mean `decoder.0.cross`?"), ("decodr.*", ""), ("xyzzy", ""), ("decoder.2", " Did you mean")],
)
def test_a_name_or_pattern_that_matches_nothing_is_refused_with_the_nearest_name(entry: str, hint: str, alone: None) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{KEY} names `{entry}`; the model has no such module.{hint}")):
        distribute(EncoderDecoder(), ["encoder.0", entry])


@pytest.mark.parametrize("wrong", ["decoder.0", [1], [""], None, [None], {"decoder.0": True}])
def test_checkpoints_are_a_list_of_names_and_nothing_else(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="checkpoints"):
        fleet.DistributedStrategy(recompute=True, recompute_configs={"checkpoints": wrong})


def test_a_refusal_leaves_the_model_as_it_was(alone: None) -> None:
    model = EncoderDecoder()
    with pytest.raises(ConfigError):
        distribute(model, ["encoder.0", "encoder.9"])
    assert not any("forward" in vars(module) for module in model.modules())


# --- no names ---------------------------------------------------------------------------------------------------------------


def test_with_no_names_our_applications_say_which() -> None:
    with torch.device("meta"):
        tiny = {"hidden": 12, "layers": 3, "heads": 3, "feed_forward": 20, "vocab_size": 23, "max_position": 16}
        assert chosen(X.applications.Bert_base(**tiny)) == [f"bert.encoder.layer.{i}" for i in range(3)]
        blocks = [f"layer{row}.{block}" for row, depth in enumerate((3, 4, 6, 3), 1) for block in range(depth)]
        assert chosen(X.applications.Resnet50()) == blocks
        assert chosen(X.applications.VGG16()) == [f"stage{i}" for i in range(1, 6)]


def test_with_no_names_and_no_word_of_the_model_every_repeated_block_is_taken() -> None:
    assert chosen(ConvNet()) == ["blocks.0", "blocks.1"]
    assert chosen(TorchTransformer()) == ["layers.0", "layers.1"]
    assert chosen(EncoderDecoder()) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    deep = nn.Sequential(nn.Sequential(Inner(), Inner()), nn.Linear(WIDTH, WIDTH), nn.Sequential(Inner(), Inner()))
    assert chosen(deep) == ["0", "2"], "the outermost row of equal blocks"


def test_the_blocks_of_torchs_encoder_and_of_our_models_without_their_own_word_are_found() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False)
    assert chosen(Chain(encoder)) == [f"unit.layers.{i}" for i in range(3)]
    assert chosen(Chain(X.applications.Resnet20())) == [f"unit.layer{row}.{i}" for row in (1, 2, 3) for i in range(3)]


def test_the_layers_of_hugging_faces_bert_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    with torch.device("meta"):
        model = transformers.BertForPreTraining(config)
    assert chosen(model) == [f"bert.encoder.layer.{i}" for i in range(3)]


def test_without_repeated_blocks_the_children_are_taken_that_have_parameters() -> None:
    assert chosen(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))) == ["0", "2"]
    assert chosen(Chain(Inner())) == ["first", "unit", "last"]
    assert chosen(UNet()) == ["down1", "down2", "middle", "up2", "up1", "head"]


class Listing(nn.Sequential):
    def __init__(self, checkpoints: Any) -> None:
        super().__init__(Inner(), Inner(), nn.Sequential(Inner(), nn.Tanh()))
        self.checkpoints = checkpoints


@pytest.mark.parametrize(
    ("own", "expected"),
    [(["1"], ["1"]), (("2.*", "0"), ["0", "2.0", "2.1"]), ([], ["0", "1"]), ("folder/", ["0", "1"])],
)
def test_what_a_model_lists_itself_is_read_as_names_given_by_the_user(own: Any, expected: list[str]) -> None:
    """An attribute of that name that is no list is about something else."""
    assert chosen(Listing(own)) == expected
    assert chosen(Listing(own), "2") == ["2"], "names given go before"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (["0", "2.00"], "names `2.00`; the model has no such module. Did you mean `2.0`?"),
        (["encoder"], "names `encoder`; the model has no such module."),
        (["2", "2.0"], "names both `2` and `2.0`, which is a part of it."),
        ([nn.Tanh()], "names Tanh(), a Tanh. Write names of modules, as text."),
    ],
)
def test_a_wrong_name_in_what_a_model_lists_itself_is_refused(own: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{KEY} is empty, and model.checkpoints {said}")):
        chosen(Listing(own))


def test_a_model_with_nothing_to_compute_again_is_refused() -> None:
    for model in (nn.Linear(2, 2), nn.Sequential(nn.Tanh())):
        with pytest.raises(
            ConfigError, match=f"recompute finds nothing to compute again in {type(model).__name__}.*Name some in"
        ):
            chosen(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_is_refused_as_a_unit_and_harmless_beside_one() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh())), Inner())
    assert chosen(model, "1") == ["1"]
    with pytest.raises(ConfigError, match=r"recompute cannot take `0`: it is a TorchScript module.*name other modules in"):
        chosen(model, "0")


def test_a_module_that_stands_in_two_places_is_one_unit_under_any_of_its_names() -> None:
    block = Inner()
    model = nn.Sequential(nn.Sequential(block, block), nn.Sequential(block))
    assert chosen(model, "0.0", "1.0") == ["0.0"]
    assert chosen(model, "1.0") == ["1.0"]
    both = nn.ModuleList([Inner(), Inner()])
    twice = nn.ModuleDict({"encoder": both, "decoder": nn.ModuleList(both)})
    assert chosen(twice) == ["encoder.0", "encoder.1"]


class Rows(nn.Module):
    """A list of single layers, which is no module to call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.ModuleList(Inner() for _ in range(2)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = row(x)
        return self.head(x)


class SingleLayers(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))


@pytest.mark.parametrize(
    ("build", "wanted"),
    [(Rows, ["rows"]), (lambda: Chain(Rows(), lambda unit, x: unit(x).repeat(1, 2)), ["unit.*"]), (SingleLayers, [])],
    ids=["named", "the outermost of a pattern", "the children of a model without blocks"],
)
def test_a_list_of_modules_is_refused_or_its_modules_are_taken(
    build: Callable[[], nn.Module], wanted: list[str], alone: None
) -> None:
    model, trace = build(), Trace()
    rows_module = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    count_runs(model.get_submodule(rows_module), trace)
    try:
        model, optimizer = distribute(model, wanted)
    except ConfigError as refusal:
        assert f"names `{rows_module}`, a ModuleList, which has no forward" in str(refusal)
        assert f"Name the modules in it: `{rows_module}.*`." in str(refusal)
        return
    optimizer.minimize(loss_of(model))
    assert trace.runs == {"0": 2, "1": 2}


# --- units that cannot be computed again ------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change, self.linear = change, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        x = x["hidden"][0] if isinstance(x, dict) else x
        self.change(x)
        return self.linear(x)


def _add(x: Tensor) -> None:
    x += 1


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "relu_": torch.relu_,
    "+=": _add,
    "one row": lambda x: x[0].zero_(),
    "a view": lambda x: x.view(-1).mul_(2),
    "a detached one": lambda x: x.detach().mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("nested", [False, True])
def test_a_unit_that_changes_its_input_in_place_is_named_at_its_forward(change: str, nested: bool, alone: None) -> None:
    use = (lambda unit, x: unit({"hidden": [x * 1]})) if nested else (lambda unit, x: unit(x * 1))
    model, _ = distribute(Chain(InPlace(CHANGES[change]), use), ["unit"])
    with pytest.raises(
        FleetError, match=r"recompute: `unit` changes an input in place.*Let it work on a copy, or leave it out of"
    ):
        model(rows(0)[0])
    with torch.no_grad():  # nothing is computed again here
        model(rows(0)[0])


def test_an_inplace_layer_at_the_start_of_a_unit_is_named_and_one_after_its_first_layer_is_fine(alone: None) -> None:
    starts = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    model, _ = distribute(Chain(starts, lambda unit, x: unit(x + 0)), ["unit"])
    with pytest.raises(FleetError, match="`unit` changes an input in place"):
        model(rows(0)[0])
    later = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
    model, optimizer = distribute(Chain(later, lambda unit, x: F.relu(unit(x) + 1, inplace=True)), ["unit"])
    optimizer.minimize(loss_of(model))


@pytest.mark.parametrize("backward", [lambda optimizer, loss: optimizer.minimize(loss), lambda optimizer, loss: loss.backward()])
def test_an_input_changed_before_backward_is_an_error_that_names_the_unit(backward: Any, alone: None) -> None:
    model, optimizer = distribute(Chain(Inner()), ["first", "unit"])
    x, y = rows(0)
    loss = F.cross_entropy(model(x), y)
    x.add_(1)
    with pytest.raises(FleetError, match=r"an input of `first` was changed in place after its forward"):
        backward(optimizer, loss)


class GrowsBy(Inner):
    """As many rows or layers as there were calls; or another type in every second one."""

    def __init__(self, kind: str) -> None:
        super().__init__(GrowsBy.grow)
        self.kind, self.calls = kind, 0

    def grow(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.kind == "layers":
            for _ in range(self.calls):
                x = torch.tanh(x)
            return x
        if self.kind == "type" and self.calls % 2 == 0:
            return torch.tanh(x.double()).float()
        return torch.tanh(x.repeat(self.calls if self.kind == "shape" else 1, 1))[: len(x)]


@pytest.mark.parametrize("kind", ["layers", "type", "shape"])
def test_a_forward_that_differs_the_second_time_is_an_error_that_names_the_unit(kind: str, alone: None) -> None:
    model, optimizer = distribute(Chain(nn.Sequential(GrowsBy(kind), Inner())), ["unit.*"])
    with pytest.raises(
        FleetError, match=r"recompute: `unit\.0` computed something else when it was run again.*an attribute that it"
    ):
        optimizer.minimize(loss_of(model))


def test_it_is_named_in_a_bare_backward_too(alone: None) -> None:
    model, _ = distribute(Chain(GrowsBy("shape")), ["unit"])
    with pytest.raises(FleetError, match="recompute: `unit` computed something else"):
        loss_of(model).backward()


def test_after_such_an_error_the_next_forward_and_backward_work(alone: None) -> None:
    unit = GrowsBy("shape")
    model, optimizer = distribute(Chain(unit), ["unit"])
    with pytest.raises(FleetError):
        optimizer.minimize(loss_of(model))
    unit.kind = "none"
    optimizer.zero_grad()
    before = model.last.weight.clone()
    assert optimizer.minimize(loss_of(model)).updated
    assert not torch.equal(before, model.last.weight)


def test_an_error_of_the_users_own_in_a_unit_stays_as_it_is_and_the_next_forward_is_computed_again(alone: None) -> None:
    runs: list[int] = []

    def fail_once(unit: Inner, x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("once")
        return x

    model, optimizer = distribute(Chain(Inner(fail_once)), ["unit"])
    with pytest.raises(ValueError, match=r"^once$"):
        model(rows(0)[0])
    optimizer.minimize(loss_of(model))
    assert len(runs) == 3
