"""What list operations need beside tensors: work in portions, and numbers that differ from tensor to tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import cpu

PORTION_ELEMENTS = 2**21
"""Tensors measured before they are updated: still in the cache that a CPU's cores share."""

Numbers: TypeAlias = Any
"""A list of floats or of tensors: torch's list operations take both, their signatures admit one at a time."""


def portions(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """On a CPU runs of whole tensors, each run small or a single tensor. Elsewhere a launch costs more than memory does."""
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


def norms(tensors: list[Tensor]) -> Tensor:
    """One vector; on a CPU in float64."""
    if tensors[0].device.type == "cpu":
        return torch.tensor(cpu.norms(tensors), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(tensors))


def one_each(numbers: Tensor) -> Numbers:
    """For list operations: plain numbers where reading them costs nothing, tensors where it would wait for the device."""
    if numbers.device.type == "cpu":
        plain: list[float] = numbers.tolist()
        return plain
    return list(numbers.unbind())


def subtract(tensors: list[Tensor], others: list[Tensor], *, factors: Numbers) -> None:
    """tensor - factor * other, in place: in one pass where factors are plain numbers. Spoils `others`."""
    if isinstance(factors[0], Tensor):
        torch._foreach_mul_(others, factors)
        torch._foreach_sub_(tensors, others)
        return
    for tensor, other, factor in zip(tensors, others, factors, strict=True):
        tensor.sub_(other, alpha=factor)
