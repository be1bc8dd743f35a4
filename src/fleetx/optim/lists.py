"""Cutting work so that a CPU finds it in its cache, and numbers that differ from tensor to tensor.

A list operation over a whole model reads it from memory once per operation. Over blocks of a cache's size it reads it once.
On other devices tensors stay whole: there a launch costs more than memory does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**16
"""Five blocks of float32 fit the 2 MB of cache that a core has."""
PORTION_ELEMENTS = 2**20
"""Tensors measured before they are updated: still in the cache that cores share."""

Numbers: TypeAlias = Any
"""A list of floats or of tensors: torch's list operations take both, their signatures admit one at a time."""


def portions(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Runs of whole tensors, each run small or a single tensor."""
    if not tensors or tensors[0].device.type != "cpu":
        yield slice(0, len(tensors))
        return
    start = size = 0
    for i, tensor in enumerate(tensors):
        if i > start and size + tensor.numel() > PORTION_ELEMENTS:
            yield slice(start, i)
            start, size = i, 0
        size += tensor.numel()
    yield slice(start, len(tensors))


def in_cache(*lists: Sequence[Tensor]) -> Iterator[tuple[list[int], tuple[list[Tensor], ...]]]:
    """Blocks of equal places in each list, with the index of the tensor that each block is of."""
    if not lists[0] or lists[0][0].device.type != "cpu":
        yield list(range(len(lists[0]))), tuple(list(tensors) for tensors in lists)
        return
    owners: list[int] = []
    blocks: tuple[list[Tensor], ...] = tuple([] for _ in lists)
    size = 0
    for i, parallel in enumerate(zip(*lists, strict=True)):
        for pieces in zip(*_pieces(parallel), strict=True):
            if owners and size + pieces[0].numel() > BLOCK_ELEMENTS:
                yield owners, blocks
                owners, blocks, size = [], tuple([] for _ in lists), 0
            owners.append(i)
            for kept, piece in zip(blocks, pieces, strict=True):
                kept.append(piece)
            size += pieces[0].numel()
    if owners:
        yield owners, blocks


def _pieces(parallel: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Tensors of one layout are cut alike in the order of their memory; others stay whole."""
    first = parallel[0]
    if first.numel() <= BLOCK_ELEMENTS:
        return [[tensor] for tensor in parallel]
    alike = all(tensor.stride() == first.stride() for tensor in parallel)
    if not alike or not torch.ops.aten.is_non_overlapping_and_dense(first):
        return [[tensor] for tensor in parallel]
    return [flat(tensor).split(BLOCK_ELEMENTS) for tensor in parallel]


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor in the order of its memory, whatever its strides."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), int(tensor.storage_offset()))


def one_each(numbers: Tensor) -> Numbers:
    """For list operations: plain numbers where reading them costs nothing, tensors where it would wait for the device."""
    if numbers.device.type == "cpu":
        plain: list[float] = numbers.tolist()
        return plain
    return list(numbers.unbind())


def pick(numbers: Numbers, owners: Sequence[int]) -> Numbers:
    return [numbers[i] for i in owners]
