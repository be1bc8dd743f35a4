"""Load public BERT weights: rename the spellings of older files, and tie the two pairs of shared tensors."""

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
_DERIVED = "embeddings.position_ids"
_OLD_NORM = re.compile(r"LayerNorm\.(gamma|beta)$")


def modern_names(state: dict[str, Tensor], prefix: str = "") -> None:
    """Rewrite the names below `prefix` in place."""
    for old in [name for name in state if name.startswith(prefix) and _OLD_NORM.search(name)]:
        new = old.removesuffix("gamma") + "weight" if old.endswith("gamma") else old.removesuffix("beta") + "bias"
        state[new] = state.pop(old)


def fill_tied(state: dict[str, Tensor], prefix: str = "") -> list[str]:
    """Fill in both names of each shared tensor, in place; return a sentence for each pair whose two tensors differ."""
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
        return False  # torch reports unequal shapes itself
    wide = torch.promote_types(one.dtype, other.dtype)
    # NaN in the same place of both counts as equal: weights of a run that diverged.
    return not torch.allclose(one.to(wide), other.to(one.device, wide), rtol=0, atol=0, equal_nan=True)


def before_loading(module: Any, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """Hook of `load_state_dict`; its last argument collects the errors that torch then raises."""
    modern_names(state, prefix)
    rest[-1].extend(fill_tied(state, prefix))


def before_loading_body(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Rename the body's weights, also in a file of the body alone, as transformers' `BertModel` writes it."""
    modern_names(state, prefix)
    state.pop(prefix + _DERIVED, None)


def is_tied(model: Any) -> bool:
    try:
        shared = model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    except AttributeError:  # the user has replaced heads or embeddings by other modules
        return False
    return bool(shared)


def tie(model: Any, *_: Any) -> None:
    """Tie the decoder to the embedding and the head. Also after loading: `assign=True` gives each name its own tensor."""
    predictions = model.cls.predictions
    predictions.decoder.weight = model.bert.embeddings.word_embeddings.weight
    predictions.decoder.bias = predictions.bias
