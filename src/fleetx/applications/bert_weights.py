"""Weights of a BERT from elsewhere: spellings that older public files use, and the two pairs of tensors that are one."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Older transformers wrote this buffer, which is only the numbers 0, 1, 2 ...
_DERIVED = "bert.embeddings.position_ids"
_OLD_NORM = re.compile(r"LayerNorm\.(gamma|beta)$")


def modern_names(state: dict[str, Tensor], prefix: str = "") -> list[str]:
    """Rewrite the names below `prefix` in place; a sentence for each pair of tied tensors that the file holds different."""
    for old in [name for name in state if name.startswith(prefix) and _OLD_NORM.search(name)]:
        new = old.removesuffix("gamma") + "weight" if old.endswith("gamma") else old.removesuffix("beta") + "bias"
        state[new] = state.pop(old)
    state.pop(prefix + _DERIVED, None)
    problems = []
    for copy, original in TIED.items():
        # A safetensors file holds a shared tensor once, under either name.
        one, other = state.get(prefix + copy), state.get(prefix + original)
        if one is None and other is not None:
            state[prefix + copy] = other
        elif other is None and one is not None:
            state[prefix + original] = one
        elif one is not None and other is not None and _differ(one, other):
            problems.append(f"{prefix + copy} differs from {prefix + original}; this model has one tensor for both.")
    return problems


def _differ(one: Tensor, other: Tensor) -> bool:
    if one is other or one.is_meta or other.is_meta or one.shape != other.shape:
        return False  # unequal shapes are reported by torch, with both of them
    return not torch.equal(one, other.to(one.device))


def before_loading(module: Any, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """A hook of `load_state_dict`; the last argument collects what torch then raises."""
    rest[-1].extend(modern_names(state, prefix))


def tie(model: Any, *_: Any) -> None:
    """The decoder's tensors are those of the embedding and the head. After loading too: `assign=True` gives each name its own."""
    predictions = model.cls.predictions
    predictions.decoder.weight = model.bert.embeddings.word_embeddings.weight
    predictions.decoder.bias = predictions.bias
