"""Fingerprints of tensors: equal bits give equal fingerprints, and other bits practically never do.

On a CPU SHA-256. On a GPU each 8 bytes are mixed with their position and summed, which stays on the device: nobody waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

# Odd 64-bit constants of full period (golden ratio, and two of splitmix64), as signed numbers: int64 arithmetic wraps around.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_CHUNK_WORDS = 2**24
"""Mixing needs a few temporaries of the size of what is mixed: 128 MiB at a time, whatever the model's size."""


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """One int64 for all of them, on their device."""
    if not tensors or tensors[0].device.type == "cpu":
        hasher = hashlib.sha256()
        for tensor in tensors:
            hasher.update(bytes_of(tensor).numpy().data)
        return torch.tensor(int.from_bytes(hasher.digest()[:8], "little", signed=True))
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for position, tensor in enumerate(tensors):
        total = total * _FIRST + _mixed_sum(tensor) + position
    return total


def bytes_of(tensor: Tensor) -> Tensor:
    """Its bits in logical order, whatever its strides."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _mixed_sum(tensor: Tensor) -> Tensor:
    data = bytes_of(tensor)
    if data.numel() % 8:
        data = torch.cat([data, data.new_zeros(8 - data.numel() % 8)])
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, chunk in enumerate(words.split(_CHUNK_WORDS)):
        first = start * _CHUNK_WORDS
        places = torch.arange(first, first + chunk.numel(), dtype=torch.int64, device=tensor.device)
        total = total + _mix(chunk + places * _GOLDEN).sum()
    return total


def _mix(words: Tensor) -> Tensor:
    """Every bit in moves about half of the bits out; a plain sum would let two flipped signs cancel."""
    words = (words ^ _shift(words, 30)) * _FIRST
    words = (words ^ _shift(words, 27)) * _SECOND
    return words ^ _shift(words, 31)


def _shift(words: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift repeats the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
