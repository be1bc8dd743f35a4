"""A batch of text as one tensor: one piece of shared memory, one pinned copy and one transfer, instead of six of each.

Sent are tokens, chosen places, and two numbers per row; the matrices that follow from these are made on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = dict[str, Tensor | None]

_TORCH = {2: torch.int16, 4: torch.int32}


class PackedBatch(NamedTuple):
    data: Tensor
    rows: int
    width: int
    chosen: int
    id_bytes: int
    padded: bool


def pack(ids: Array, positions: Array, labels: Array, *, splits: Array, lengths: Array, follows: Array) -> PackedBatch:
    """Wide numbers first: each begins at a multiple of its own size."""
    parts = [array.astype(np.int32) for array in (positions, splits, lengths)] + [ids, labels, (~follows).astype(np.uint8)]
    data = np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])
    rows, width = ids.shape
    return PackedBatch(torch.from_numpy(data), rows, width, len(positions), ids.itemsize, bool(lengths.min() < width))


def unpack(packed: PackedBatch) -> Batch:
    """What a BERT takes, in 64-bit integers, on the device where the data is."""
    rows, width, chosen, small = packed.rows, packed.width, packed.chosen, _TORCH[packed.id_bytes]
    counts_and_types = [(chosen, torch.int32), (rows, torch.int32), (rows, torch.int32), (rows * width, small), (chosen, small)]
    found, start = [], 0
    for count, dtype in [*counts_and_types, (rows, torch.uint8)]:
        end = start + count * dtype.itemsize
        found.append(packed.data[start:end].view(dtype).long())
        start = end
    positions, splits, lengths, ids, labels, not_next = found
    columns = torch.arange(width, device=ids.device)
    inside = columns < lengths[:, None]
    return {
        "input_ids": ids.view(rows, width),
        "token_type_ids": (inside & (columns >= splits[:, None])).long(),
        "attention_mask": inside if packed.padded else None,
        "mlm_positions": positions,
        "mlm_labels": labels,
        "next_sentence_label": not_next,
    }
