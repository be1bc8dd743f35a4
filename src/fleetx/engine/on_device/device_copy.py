"""Copy tensors back where a flag on the device says so: by one kernel that ends at once where it does not, or by a select."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from .triton_support import has_triton, runs_here

CHUNK_BYTES = 2**14


@final
class PutBack:
    """Copies `copies` back into `tensors` of the same types, shapes and strides."""

    def __init__(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._tensors, self._copies = list(tensors), list(copies)
        self._places: list[int] = []
        self._table: Tensor | None = None
        device = self._tensors[0].device
        by_kernel = has_triton() and runs_here(device) and all(map(_is_alike, self._tensors, self._copies))
        self._kernel: Any = _kernel() if by_kernel else None

    def __call__(self, found: Tensor) -> None:
        """Copy where `found` is not 0."""
        if self._kernel is None:
            flag = found != 0.0
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                torch.where(flag, copy, tensor, out=tensor)
            return
        table = self._chunks()
        self._kernel[(len(table),)](table, found, CHUNK_BYTES, num_warps=4)
        torch.autograd.graph.increment_version(self._tensors)

    def _chunks(self) -> Tensor:
        """Addresses and lengths, a row for each chunk. Written again where a tensor has moved (`param.data = ...`)."""
        places = list(map(Tensor.data_ptr, self._tensors))
        if self._table is None or places != self._places:
            rows = []
            for place, tensor, copy in zip(places, self._tensors, self._copies, strict=True):
                for start in range(0, tensor.nbytes, CHUNK_BYTES):
                    rows.append([place + start, copy.data_ptr() + start, min(CHUNK_BYTES, tensor.nbytes - start)])
            on_gpu = self._tensors[0].device.type == "cuda"
            host = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
            self._places, self._table = places, host.to(self._tensors[0].device, non_blocking=on_gpu)
        return self._table


def _is_alike(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether both are the same in memory, so that bytes can be copied."""
    return tensor.stride() == copy.stride() and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


@functools.cache
def _kernel() -> Any:
    from .device_copy_triton import put_back  # Triton is imported only where it is used

    return put_back
