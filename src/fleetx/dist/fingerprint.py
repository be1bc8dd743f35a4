"""Fingerprints of tensors: equal bits give equal fingerprints, and other bits practically never do.

On a CPU SHA-256. On a GPU each 8 bytes are mixed with their position and summed, which stays on the device: nobody waits.
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
"""Small tensors are joined up to this size: hundreds of calls and launches become a few. Mixing needs some copies of it."""


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """One int64 for all of them, on their device."""
    return hashed(tensors) if not tensors or tensors[0].device.type == "cpu" else mixed(tensors)


def hashed(tensors: Sequence[Tensor]) -> Tensor:
    hasher = hashlib.sha256()
    for joined in _joined(tensors, _CPU_BYTES):
        hasher.update(joined.numpy().data)
    return torch.tensor(int.from_bytes(hasher.digest()[:8], "little", signed=True))


def mixed(tensors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for joined in _joined(tensors, _GPU_BYTES):
        for piece in joined.split(_GPU_BYTES):
            total = total * _FIRST + _mixed_sum(piece)
    return total


def bytes_of(tensor: Tensor) -> Tensor:
    """Its bits in logical order, whatever its strides."""
    flat = tensor.detach().reshape(-1)
    # One element counts as contiguous with any stride, but cannot be viewed as bytes then.
    return (flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _joined(tensors: Sequence[Tensor], limit_bytes: int) -> Iterator[Tensor]:
    """All bytes in order, in pieces of at most the limit; a larger tensor is a piece by itself."""
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
    """Each 8 bytes mixed with their place, and summed; the last ones are filled up with zeros, and the length is mixed in."""
    length = data.numel()
    if length % 8 or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-length % 8)])
    words = data.view(torch.int64)
    places = torch.arange(words.numel(), dtype=torch.int64, device=data.device)
    return _mix(words + places * _GOLDEN).sum() + length


def _mix(words: Tensor) -> Tensor:
    """Every bit in moves about half of the bits out; a plain sum would let two flipped signs cancel."""
    words = (words ^ _shift(words, 30)) * _FIRST
    words = (words ^ _shift(words, 27)) * _SECOND
    return words ^ _shift(words, 31)


def _shift(words: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift repeats the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
