"""Send a batch of text in few bytes, and expand it on the device into what a BERT takes."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = dict[str, Tensor | None]


class CompactBatch(NamedTuple):
    """Tokens, masked positions, and three numbers per row; the matrices that follow from these are not sent."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    splits: Tensor
    lengths: Tensor
    not_next: Tensor
    is_padded: bool


def compact(ids: Array, positions: Array, labels: Array, *, splits: Array, lengths: Array, follows: Array) -> CompactBatch:
    """Convert the arrays of a batch to tensors of narrow types."""

    def number(array: Array) -> Tensor:
        return torch.from_numpy(array.astype(np.int32))

    return CompactBatch(
        ids=torch.from_numpy(ids),
        positions=number(positions),
        labels=torch.from_numpy(labels),
        splits=number(splits),
        lengths=number(lengths),
        not_next=torch.from_numpy(~follows),
        is_padded=bool(lengths.min() < ids.shape[1]),
    )


def widened(batch: CompactBatch) -> Batch:
    """Expand a batch into BERT's inputs, as 64-bit integers on the batch's device."""
    columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    inside = columns < batch.lengths[:, None]
    return {
        "input_ids": batch.ids.long(),
        "token_type_ids": (inside & (columns >= batch.splits[:, None])).long(),
        "attention_mask": inside if batch.is_padded else None,
        "mlm_positions": batch.positions.long(),
        "mlm_labels": batch.labels.long(),
        "next_sentence_label": batch.not_next.long(),
    }
