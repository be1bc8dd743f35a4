"""Check a BERT batch before it is used. Values are checked on the CPU only: on a GPU the check would wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, did_you_mean
from ..recompute.chunked_loss import IGNORED
from .bert_encoder import BertConfig

KEYS = (
    "input_ids", "attention_mask", "token_type_ids", "position_ids",
    "labels", "next_sentence_label", "mlm_positions", "mlm_labels",
)  # fmt: skip


def require_batch(batch: Any) -> Mapping[str, Tensor | None]:
    """Check that the batch is a mapping with inputs and labels that `forward` knows."""
    if not isinstance(batch, Mapping):
        raise DataError(f"a BERT batch must be a dict with `input_ids` and labels; this is a {type(batch).__name__}.")
    unknown = [name for name in batch if name not in KEYS]
    if unknown:
        hint = did_you_mean(str(unknown[0]), KEYS)
        raise DataError(f"the batch holds `{unknown[0]}`; a BERT batch may hold {', '.join(KEYS)}.{hint}")
    if batch.get("input_ids") is None:
        raise DataError(f"the batch holds {', '.join(map(str, batch)) or 'nothing'}; it must hold `input_ids`.")
    if all(batch.get(name) is None for name in ("labels", "mlm_labels", "next_sentence_label")):
        raise DataError("the batch has no labels: give `mlm_positions` and `mlm_labels`, or `labels`, or `next_sentence_label`.")
    return batch


def check_inputs(config: BertConfig, batch: Mapping[str, Tensor | None]) -> None:
    """Check shapes, number types and, on the CPU, ranges; `batch` holds every name in KEYS."""
    ids = batch["input_ids"]
    if ids is None or ids.dim() != 2 or ids.shape[1] == 0:
        shape = None if ids is None else tuple(ids.shape)
        raise DataError(f"input_ids has shape {shape}; it must be [samples, tokens] with at least one token.")
    rows, length = ids.shape
    if length > config.max_position:
        raise DataError(
            f"input_ids holds {length} tokens per sample; this model has {config.max_position} positions. "
            f"Cut the samples, or build the model with max_position={length}."
        )
    for name in ("attention_mask", "token_type_ids", "labels"):
        _require_shape(name, batch[name], (rows, length))
    positions = batch["position_ids"]
    if positions is not None and tuple(positions.shape) not in {(rows, length), (1, length)}:
        _require_shape("position_ids", positions, (rows, length))
    _require_shape("next_sentence_label", batch["next_sentence_label"], (rows,))
    _check_padding(batch["attention_mask"])
    _check_masked(batch)
    _check_ranges(config, batch, rows * length)


def _check_padding(mask: Tensor | None) -> None:
    if mask is None or mask.dtype == torch.bool or mask.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = (mask != 0) & (mask != 1)
    if bad.any():  # for example -10000, meant to be added to the scores: read as true it would mean the opposite
        raise DataError(f"attention_mask holds {mask[bad][0].item()}; it must be 1 for a token and 0 for padding.")


def _check_masked(batch: Mapping[str, Tensor | None]) -> None:
    positions, labels = batch["mlm_positions"], batch["mlm_labels"]
    if (positions is None) != (labels is None):
        raise DataError("mlm_positions and mlm_labels come together; the batch holds only one of them.")
    if positions is None or labels is None:
        return
    if batch["labels"] is not None:
        raise DataError("the batch holds both `labels` and `mlm_labels`; keep one of them.")
    if positions.dim() != 1 or positions.shape != labels.shape:
        raise DataError(
            f"mlm_positions has shape {tuple(positions.shape)} and mlm_labels {tuple(labels.shape)}; both must be [masked "
            "tokens], positions counted through the whole batch: row * tokens + column."
        )


def _check_ranges(config: BertConfig, batch: Mapping[str, Tensor | None], tokens: int) -> None:
    vocabulary = f"vocab_size={config.vocab_size}: is this the vocabulary that the data was made with?"
    limits = {
        "input_ids": (config.vocab_size, False, vocabulary),
        "token_type_ids": (config.sentence_types, False, f"sentence_types={config.sentence_types}"),
        "position_ids": (config.max_position, False, f"max_position={config.max_position}"),
        "mlm_positions": (tokens, False, "row * tokens + column"),
        "labels": (config.vocab_size, True, vocabulary),
        "mlm_labels": (config.vocab_size, True, vocabulary),
        "next_sentence_label": (2, True, "0: the second sentence follows the first; 1: it does not"),
    }
    for name, (end, may_ignore, why) in limits.items():
        values = batch[name]
        if values is None:
            continue
        if values.dtype not in (torch.int64, torch.int32):
            raise DataError(f"{name} is of {values.dtype}; token numbers must be int64 or int32: write {name}.long().")
        if values.device.type != "cpu" or torch.compiler.is_compiling() or not values.numel():
            continue
        bad = (values < 0) | (values >= end)
        if may_ignore:
            bad &= values != IGNORED
        if bad.any():
            ignored = f", or {IGNORED} to leave one out" if may_ignore else ""
            raise DataError(f"{name} holds {values[bad][0].item()}; allowed are 0 to {end - 1}{ignored} ({why}).")


def _require_shape(name: str, values: Tensor | None, shape: tuple[int, ...]) -> None:
    if values is not None and tuple(values.shape) != shape:
        raise DataError(f"{name} has shape {tuple(values.shape)}; beside these input_ids it must be {shape}.")
