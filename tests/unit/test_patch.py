"""Patched forwards: copies are plain and compute with their own weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn

from fleetx.engine.modules.nested_tensors import map_tensors
from fleetx.engine.modules.patching import patch_forward


def _doubled(forward: Any, *args: Any) -> Any:
    return 2 * forward(*args)


def test_a_deep_copy_has_the_original_forward_and_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    x = torch.ones(1, 2)
    plain = model(x).detach()
    patch_forward(model, _doubled)
    patch_forward(model, _doubled)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(model(x), 4 * plain)
    nn.init.zeros_(model[0].weight)
    torch.testing.assert_close(twin(x), plain)
    torch.testing.assert_close(copy.deepcopy(twin)(x), plain)


def test_a_patched_model_can_be_saved_whole_and_loads_plain() -> None:
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    plain = model(x).detach()
    patch_forward(model, _doubled)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), plain)


def test_names_class_and_keys_stay() -> None:
    model = nn.Linear(2, 2)
    keys = list(model.state_dict())
    patch_forward(model, _doubled)
    assert type(model) is nn.Linear and list(model.state_dict()) == keys


def test_map_tensors_keeps_container_types() -> None:
    value = {"a": [torch.ones(1), (torch.zeros(1), "text", 3)], "b": torch.return_types.max((torch.ones(1), torch.ones(1)))}
    changed = map_tensors(lambda t: t + 1, {"a": value["a"]})
    assert changed["a"][0].item() == 2 and changed["a"][1][0].item() == 1
    assert isinstance(changed["a"][1], tuple) and changed["a"][1][1:] == ("text", 3)
    assert value["a"][0].item() == 1
