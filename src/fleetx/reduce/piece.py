"""One parameter's gradient as a row of memory: what compressors keep, and what they read of weights, is in its order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from ..engine.bucket import Bucket, in_memory_order


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One parameter's gradient, as a row of its bucket's memory."""

    name: str
    param: nn.Parameter
    view: Tensor
    """The gradient as `param.grad` shows it. Its strides are those that the parameter had at the start, whatever came later."""
    grad: Tensor
    bucket: Bucket
    offset: int
    """Where the row begins in the bucket."""

    def shaped(self, row: Tensor) -> Tensor:
        """A row in the same order of memory, shaped as the gradient is."""
        return torch.as_strided(row, self.view.shape, self.view.stride(), int(row.storage_offset()))

    def weights(self) -> Tensor:
        """The parameter as a row in the order of the gradient's; a copy where it lies otherwise in memory."""
        param = self.param.detach()
        if param.stride() == self.view.stride():
            return in_memory_order(param)
        row = torch.empty(param.numel(), dtype=param.dtype, device=param.device)
        self.shaped(row).copy_(param)
        return row


def pieces_of(bucket: Bucket) -> list[Piece]:
    rows = bucket.flat.split([p.numel() for p in bucket.params])
    offsets = [int(row.storage_offset()) for row in rows]
    parts = zip(bucket.names, bucket.params, bucket.views, rows, offsets, strict=True)
    return [Piece(name, param, view, row, bucket, offset) for name, param, view, row, offset in parts]
