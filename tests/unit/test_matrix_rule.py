"""Which tensors Muon updates, by names and modules; what is suspicious is said with the line to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleetx import applications
from fleetx.optim import Muon


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm([2, width])


class Language(nn.Module):
    def __init__(self, *, tied: bool, width: int = 8) -> None:
        super().__init__()
        self.wte, self.positions = nn.Embedding(50, width), nn.Parameter(torch.zeros(1, 5, width))
        self.blocks = nn.ModuleList(Attention(width) for _ in range(2))
        self.lm_head = nn.Linear(width, 50, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def told(model: nn.Module, **settings: Any) -> dict[str, tuple[bool, str]]:
    optimizer = Muon(model.named_parameters(), model=model, **settings)
    return {name: (chosen.by_muon, chosen.why) for _, _, name, chosen in optimizer.parameters_with_choices()}


def test_a_language_model_keeps_embeddings_heads_norms_and_biases_for_adamw() -> None:
    assert told(Language(tied=False)) == {
        "wte.weight": (False, "embedding"),
        "positions": (False, "a single row or column"),
        **{
            f"blocks.{i}.{name}": chosen
            for i in range(2)
            for name, chosen in {
                "qkv.weight": (True, "a matrix"),
                "qkv.bias": (False, "bias"),
                "out.weight": (True, "a matrix"),
                "out.bias": (False, "bias"),
                "norm.weight": (False, "norm layer"),
                "norm.bias": (False, "norm layer"),
            }.items()
        },
        "lm_head.weight": (False, "named like a head"),
    }


def test_a_tied_embedding_counts_as_one() -> None:
    found = told(Language(tied=True))
    assert found["wte.weight"] == (False, "embedding, tied to another layer") and "lm_head.weight" not in found


def test_the_last_linear_of_a_plain_stack_is_its_head() -> None:
    found = told(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    assert [by_muon for by_muon, _ in found.values()] == [True, False, True, False, False, False]
    assert found["4.weight"] == (False, "the last Linear of the model")


def test_an_output_as_large_as_the_vocabulary_is_a_head_whatever_its_name() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(30, 6), "outlet": nn.Linear(6, 30), "other": nn.Linear(6, 5)})
    assert told(model)["outlet.weight"] == (False, "its output has the size of the vocabulary")


def test_the_last_linear_of_repeated_blocks_is_no_head() -> None:
    found = told(nn.Sequential(*(Attention(4) for _ in range(3))))
    assert found["2.out.weight"] == (True, "a matrix")


def test_words_decide_too_and_a_kind_that_is_left_out_goes_to_muon() -> None:
    found = told(Language(tied=False), exclude=["embedding", "norm", "bias", "qkv"])
    assert found["lm_head.weight"] == (True, "a matrix")
    assert found["blocks.0.qkv.weight"] == (False, '"qkv" in its name')
    assert found["blocks.0.out.weight"] == (True, "a matrix")


def test_names_alone_decide_where_the_model_is_not_given() -> None:
    model = Language(tied=False)
    optimizer = Muon(model.named_parameters())
    found = {name: chosen.by_muon for _, _, name, chosen in optimizer.parameters_with_choices()}
    assert [name for name, by_muon in found.items() if by_muon] == [
        f"blocks.{i}.{n}.weight" for i in range(2) for n in ("qkv", "out")
    ]


def test_without_names_dimensions_decide() -> None:
    optimizer = Muon(Language(tied=False).parameters())
    for _, param, _, chosen in optimizer.parameters_with_choices():
        assert chosen.by_muon == (param.dim() >= 2)


def test_resnet50_gives_muon_its_convolutions_and_adamw_the_rest() -> None:
    found = told(applications.Resnet50())
    assert all(
        by_muon == (name.endswith("weight") and ("conv" in name or "downsample.0" in name))
        for name, (by_muon, _) in found.items()
    )
    assert found["fc.weight"] == (False, "named like a head")


def test_a_matrix_named_like_a_head_that_muon_updates_is_told_with_the_line_to_write() -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(6, 5))
    model.add_module("classifier", nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    (said,) = Muon(model.named_parameters(), model=model).doubts()
    assert said.startswith("Muon updates `classifier.0.weight`, by name part of a head")
    assert 'strategy.muon_configs = {"exclude": ["embedding", "head", "norm", "bias", "classifier.0.weight"]}' in said


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)), "1.weight"),
        (nn.ModuleDict({"time_embed": nn.Linear(6, 4), "end": nn.Linear(4, 2)}), "time_embed.weight"),
    ],
)
def test_a_hidden_looking_matrix_that_goes_to_adamw_is_told_too(model: nn.Module, name: str) -> None:
    (doubt,) = Muon(model.named_parameters(), model=model).doubts()
    assert doubt.startswith(f"AdamW updates `{name}`, by name or place") and '"use_muon": True' in doubt


def test_a_frozen_parameter_is_described_as_such() -> None:
    model = Language(tied=False)
    model.blocks.requires_grad_(False)
    lines = Muon(model.named_parameters(), model=model).describe().splitlines()
    assert lines[3].split() == ["blocks.0.qkv.weight", "24x8", "none", "frozen"]
