"""Fingerprints of tensors: equal bits give equal fingerprints, and other bits practically never do.

CPU tensors go through SHA-256. On a GPU each 8 bytes are mixed with their position and summed, without waiting for the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Odd 64-bit constants of full period (golden ratio, and two of splitmix64), as signed numbers: int64 arithmetic wraps around.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_CPU_BYTES, _GPU_BYTES = 2**20, 2**27
"""Small tensors are joined up to these sizes, to save calls and kernel launches. Mixing needs a few copies of one piece."""


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return one int64 for all tensors, on their device."""
    return hashed(tensors) if not tensors or tensors[0].device.type == "cpu" else mixed(tensors)


def hashed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the first 8 bytes of the SHA-256 of all tensors' bytes."""
    hasher = hashlib.sha256()
    for joined in _joined(tensors, _CPU_BYTES):
        hasher.update(joined.numpy().data)
    return torch.tensor(int.from_bytes(hasher.digest()[:8], "little", signed=True))


def mixed(tensors: Sequence[Tensor]) -> Tensor:
    """Return a position-dependent sum of all tensors' bytes, computed on their device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for joined in _joined(tensors, _GPU_BYTES):
        for piece in joined.split(_GPU_BYTES):
            total = total * _FIRST + _mixed_sum(piece)
    return total


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes in logical order, independent of its strides."""
    flat = tensor.detach().reshape(-1)
    # A single element counts as contiguous with any stride, but cannot be viewed as bytes unless the stride is 1.
    return (flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _joined(tensors: Sequence[Tensor], limit_bytes: int) -> Iterator[Tensor]:
    """Yield all bytes in order, in pieces of at most the limit; a larger tensor is a piece by itself."""
    waiting: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if waiting and size + tensor.nbytes > limit_bytes:
            yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
            waiting, size = [], 0
        waiting.append(bytes_of(tensor))
        size += tensor.nbytes
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]


def _mixed_sum(data: Tensor) -> Tensor:
    """Sum all 8-byte words mixed with their position; the last word is padded with zeros, and the length is added."""
    length = data.numel()
    if length % 8 or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-length % 8)])
    words = data.view(torch.int64)
    places = torch.arange(words.numel(), dtype=torch.int64, device=data.device)
    return _mix(words + places * _GOLDEN).sum() + length


def _mix(words: Tensor) -> Tensor:
    """Scramble each word so that one input bit changes about half of the output bits; in a plain sum two flipped signs cancel."""
    words = (words ^ _shift(words, 30)) * _FIRST
    words = (words ^ _shift(words, 27)) * _SECOND
    return words ^ _shift(words, 31)


def _shift(words: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros: torch's own shift repeats the sign bit."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
