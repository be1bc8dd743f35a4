"""What list operations need beside tensors: work in portions, and numbers that differ from tensor to tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from . import cpu

PORTION_ELEMENTS = 2**21
"""Tensors measured before they are updated: still in the cache that a CPU's cores share."""

Numbers: TypeAlias = Any
"""A list of floats or of tensors: torch's list operations take both, their signatures admit one at a time."""
Norm = TypeVar("Norm", float, Tensor)


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


def norms(tensors: list[Tensor]) -> Numbers:
    """Plain numbers where reading them costs nothing, a vector where it would wait for the device."""
    return cpu.norms(tensors) if tensors[0].device.type == "cpu" else torch.stack(torch._foreach_norm(tensors))


def scaled_rates(lr: float | Tensor, lengths: Numbers, trust_ratio: Callable[..., Any]) -> tuple[Tensor, Numbers]:
    """Trust ratios as a vector, and the rate of each tensor; `lengths` are the norms of parameters, then those they go with."""
    half = len(lengths) // 2
    if isinstance(lengths, Tensor):
        ratios: Tensor = trust_ratio(lengths[:half], lengths[half:])
        return ratios, list((lr * ratios).unbind())
    plain = list(map(trust_ratio, lengths[:half], lengths[half:]))
    return torch.tensor(plain, dtype=torch.float64), [lr * ratio for ratio in plain]


def subtract(tensors: list[Tensor], others: list[Tensor], *, factors: Numbers) -> None:
    """tensor - factor * other, in place: in one pass where factors are plain numbers. Spoils `others`."""
    if isinstance(factors[0], Tensor):
        torch._foreach_mul_(others, factors)
        torch._foreach_sub_(tensors, others)
        return
    for tensor, other, factor in zip(tensors, others, factors, strict=True):
        tensor.sub_(other, alpha=factor)
