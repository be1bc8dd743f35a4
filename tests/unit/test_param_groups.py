"""Which parameters are decayed and adapted: by name, by the layer that holds them, by their group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleetx.errors import ConfigError
from fleetx.optim import Lamb, Lars
from fleetx.optim.param_groups import ParamInfo, exclusion, info_from_model, is_norm


class RMSNormOfMine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


class NormLinear(nn.Linear):
    """Its weight is a matrix as any other."""


class ImageNorm(nn.LayerNorm):
    """Of torch's kind, so that its weight is a norm's whatever its shape."""


class Block(nn.Module):
    """As in a ResNet: the norm layer of the shortcut has nothing but a number for a name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 2, 3)
        self.bn1 = nn.BatchNorm2d(2)
        self.downsample = nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2))
        self.mine = RMSNormOfMine()
        self.projection = NormLinear(4, 4, bias=False)
        self.image = ImageNorm([3, 3], bias=False)
        self.attention = nn.MultiheadAttention(4, 1)
        self.embedding = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3)
        self.head.weight = self.embedding.weight


def left_out(**settings: Any) -> list[str]:
    model = Block()
    optimizer = Lars(model.parameters(), lr=0.1, model=model, **settings)
    return [name for _, _, name, flags in optimizer.parameters_with_flags() if not flags.decay]


NORMS = ["bn1.weight", "bn1.bias", "downsample.1.weight", "downsample.1.bias", "mine.gain", "image.weight"]
BIASES = ["conv1.bias", "bn1.bias", "downsample.1.bias", "attention.in_proj_bias", "attention.out_proj.bias", "head.bias"]


def test_norm_layers_and_biases_are_left_out_by_default() -> None:
    assert set(left_out()) == {*NORMS, *BIASES}


@pytest.mark.parametrize("word", ["norm", "batch_norm", "layer_norm"])
def test_a_word_for_norm_layers_means_all_of_them_wherever_they_are(word: str) -> None:
    assert set(left_out(exclude_from_weight_decay=[word])) == set(NORMS)


@pytest.mark.parametrize("word", ["bias", ".b_0"])
def test_a_word_for_biases_means_all_of_them_also_inside_norm_layers(word: str) -> None:
    assert set(left_out(exclude_from_weight_decay=[word])) == set(BIASES)


def test_any_other_word_is_a_part_of_the_name() -> None:
    assert left_out(exclude_from_weight_decay=["conv1", "head.b"]) == ["conv1.weight", "conv1.bias", "head.bias"]


def test_nothing_is_left_out_where_nothing_is_asked_for() -> None:
    assert left_out(exclude_from_weight_decay=[]) == []


def test_a_word_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"names 'embeding'; no parameter's name contains it. Did you mean `embedding`\?"):
        left_out(exclude_from_weight_decay=["norm", "embeding"])


@pytest.mark.parametrize(
    ("word", "near"), [("nrom", "norm"), ("LayerNorm", "norm"), ("baises", "bias"), ("*.bias", "bias"), ("gamma", None)]
)
def test_a_word_that_matches_nothing_is_refused_with_the_words_for_norms_and_biases(word: str, near: str | None) -> None:
    told = rf" Did you mean `{near}`\?" if near else ""
    with pytest.raises(ConfigError, match=rf'contains it.{told} For norm layers of any name write "norm", for biases "bias"'):
        left_out(exclude_from_weight_decay=[word])


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (nn.Linear(2, 2), "model is Linear, and none of the parameters given is in it"),
        ([nn.Linear(2, 2)], "model is list; it must be the nn.Module that holds the parameters"),
    ],
)
def test_a_model_that_holds_none_of_the_parameters_is_refused(model: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Lars(Block().parameters(), lr=0.1, model=model)


def test_a_model_may_hold_only_some_of_the_parameters() -> None:
    model, extra = nn.Linear(2, 2), nn.Parameter(torch.ones(3, 3))
    optimizer = Lars([*model.named_parameters(), ("extra", extra)], lr=0.1, model=model)
    assert [name for _, _, name, _ in optimizer.parameters_with_flags()] == ["weight", "bias", "extra"]


def test_two_parameters_of_one_name_are_refused() -> None:
    pairs = [("a.weight", nn.Parameter(torch.ones(2, 2))) for _ in range(2)]
    for groups in (pairs, [{"params": [pair]} for pair in pairs]):
        with pytest.raises(ConfigError, match="several parameters have the same name: 'a.weight'. Give each a name of its own"):
            Lars(groups, lr=0.1)


def test_a_frozen_parameter_is_neither_and_says_so() -> None:
    model = nn.Linear(3, 2, bias=False).requires_grad_(False)
    optimizer = Lars(model.parameters(), lr=0.1, model=model)
    assert optimizer.describe().splitlines()[1].split() == ["weight", "2x3", "no", "no", "frozen"]
    model.requires_grad_(True)
    assert optimizer.describe().splitlines()[1].split()[2:] == ["yes", "yes", "not", "excluded"]


def test_a_bare_string_is_not_a_list_of_words() -> None:
    with pytest.raises(ConfigError, match="exclude_from_weight_decay is 'norm'; it must be a list of non-empty strings"):
        left_out(exclude_from_weight_decay="norm")


def test_names_alone_tell_biases_and_tensors_of_one_dimension_are_taken_for_norms() -> None:
    model = Block()
    optimizer = Lars(model.named_parameters(), lr=0.1)
    flags = {name: flags for _, _, name, flags in optimizer.parameters_with_flags()}
    assert not flags["downsample.1.weight"].decay and flags["downsample.1.weight"].why == "one dimension, module not known"
    assert not flags["conv1.bias"].decay and flags["conv1.bias"].why == "bias"
    assert flags["image.weight"].decay, "of two dimensions, in a layer that is not shown"


def test_without_names_tensors_of_one_dimension_or_fewer_are_left_out() -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), ())]
    optimizer = Lars(params, lr=0.1)
    rows = [(name, flags.decay, flags.adapt) for _, _, name, flags in optimizer.parameters_with_flags()]
    assert rows == [("parameter 0", True, True), ("parameter 1", False, False), ("parameter 2", False, False)]


@pytest.mark.parametrize("words", [["head"], ["norm"], ["bias"], ["norm", "bias", "head"]])
def test_words_that_need_names_are_refused_without_names(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="some parameters have no names. Give model=model or model.named_parameters"):
        Lars([nn.Parameter(torch.ones(2, 2))], lr=0.1, exclude_from_weight_decay=words)


def test_a_tied_weight_is_one_parameter_under_its_first_name() -> None:
    names = [known.name for known in info_from_model(Block()).values()]
    assert "embedding.weight" in names and "head.weight" not in names


def test_a_weight_that_a_norm_layer_shares_is_in_a_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.LayerNorm([3, 3], bias=False))
    model[1].weight = model[0].weight
    assert info_from_model(model) == {id(model[0].weight): ParamInfo("0.weight", 2, True)}


def test_names_of_a_compiled_model_are_the_users() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.Module()
    wrapped.add_module("_orig_mod", model)
    assert [known.name for known in info_from_model(wrapped).values()] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), nn.RMSNorm(2)])
def test_torchs_norm_layers_are_known(layer: nn.Module) -> None:
    linear = nn.Linear(2, 2)
    assert is_norm(layer, torch.ones(2, 2)) and not is_norm(linear, linear.bias)


def test_a_class_of_ones_own_with_norm_in_its_name_leaves_out_no_matrix() -> None:
    layer = NormLinear(2, 2)
    assert is_norm(layer, layer.bias) and not is_norm(layer, layer.weight)


def test_a_word_for_biases_looks_at_the_last_part_of_the_name() -> None:
    assert exclusion(ParamInfo("bias_net.weight", 2, False), ["bias"]) == '"bias" in its name'
    assert exclusion(ParamInfo("bias_net.weight", 2, False), [".b_0"]) is None
    assert exclusion(ParamInfo("a.bias", 1, False), [".b_0"]) == "bias"


def test_a_group_overrides_its_parameters_flags_each_for_itself() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [("weight", weight)], "adapt": False}, {"params": [("bias", bias)], "decay": True}]
    optimizer = Lars(groups, lr=0.1)
    assert [(f.decay, f.adapt, f.why) for _, _, _, f in optimizer.parameters_with_flags()] == [
        (True, False, "its group says adapt=False"),
        (True, False, "its group says decay=True"),
    ]


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="adapt is 1; it must be True or False"):
        Lars([{"params": [nn.Parameter(torch.ones(2, 2))], "adapt": 1}], lr=0.1)


@pytest.mark.parametrize(
    ("settings", "adapted"),
    [
        ({}, [True, False]),
        ({"lamb_weight_decay": 0.0}, [False, False]),
        ({"lamb_weight_decay": 0.0, "always_adapt": True}, [True, True]),
        ({"always_adapt": True}, [True, True]),
    ],
)
def test_lamb_adapts_what_it_decays_unless_told_to_adapt_all(settings: dict[str, Any], adapted: list[bool]) -> None:
    model = nn.Linear(2, 2)
    optimizer = Lamb(model.parameters(), model=model, **settings)
    assert [flags.adapt for flags in optimizer.flags[0]] == adapted


def test_describe_has_one_line_per_parameter_with_its_reason() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert Lars(model.parameters(), lr=0.1, model=model).describe().splitlines() == [
        "parameter  shape  decayed  adapted  why",
        "0.weight   2x3    yes      yes      not excluded",
        "0.bias     2      no       no       bias",
        "1.weight   2      no       no       norm layer",
        "1.bias     2      no       no       norm layer",
    ]
    text = Lamb(model.parameters(), model=model, lamb_weight_decay=0.0).describe().splitlines()[1]
    assert text == "0.weight   2x3    no       no       no weight decay, so not adapted: set always_adapt=True to adapt it"
