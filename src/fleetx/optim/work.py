"""Gather one update's tensors by group, flags and type, for the loop and the list operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .list_ops import portions

if TYPE_CHECKING:
    from .layerwise import Layerwise

NARROW = (torch.float16, torch.bfloat16)
"""Parameters of these types have a float32 copy in the state, which the update changes."""


def as_number(lr: float | Tensor) -> float | Tensor:
    """Return a learning rate on the CPU as a plain number; one on a device stays there, since reading it would wait."""
    return float(lr) if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr


@dataclass(slots=True)
class Work:
    """The tensors of one group, flags and type that one update changes; for 16-bit parameters their float32 copies."""

    group: dict[str, Any]
    decay: bool
    adapt: bool
    names: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Of the tensors among all parameters, in the order of the groups."""
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    moments: tuple[list[Tensor], ...] = ()
    counts: list[Tensor] = field(default_factory=list)

    def cut(self) -> Iterator[Work]:
        """Split into portions that fit the cache."""
        for part in portions(self.params):
            yield Work(
                self.group,
                self.decay,
                self.adapt,
                self.names[part],
                self.places[part],
                self.params[part],
                self.grads[part],
                tuple(moment[part] for moment in self.moments),
                self.counts[part],
            )


def gather(optimizer: Layerwise) -> list[Work]:
    """Gather all tensors with a gradient, and count their steps."""
    works: dict[Any, Work] = {}
    for place, (group, param, name, flags) in enumerate(optimizer.parameters_with_flags()):
        if param.grad is None:
            continue
        if param.grad.layout is not torch.strided:
            optimizer.refuse_sparse(name)
        state = optimizer.state_of(param, count_on=torch.device("cpu"))
        weight = wide_copy(param, state) if param.dtype in NARROW else param
        key = id(group), flags.decay, flags.adapt, weight.dtype, weight.device
        if key not in works:
            works[key] = Work(group, flags.decay, flags.adapt, moments=tuple([] for _ in optimizer.moments))
        work = works[key]
        grad = param.grad.to(weight.dtype)
        work.names.append(name)
        work.places.append(place)
        work.params.append(weight)
        work.grads.append(-grad if group["maximize"] else grad)
        for tensors, moment in zip(work.moments, optimizer.moments, strict=True):
            tensors.append(state[moment])
        if optimizer.counts_steps:
            work.counts.append(state["step"])
    for work in works.values():
        if work.counts:
            torch._foreach_add_(work.counts, torch.ones(()))  # only now: a gradient that is refused must not be counted
    return list(works.values())


def write_back(optimizer: Layerwise) -> None:
    """Copy the float32 copies into their 16-bit parameters."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.dtype in NARROW and param.grad is not None:
                param.copy_(optimizer.state[param]["master"])


def wide_copy(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Return the float32 copy, updated where the parameter was written by other code since."""
    master: Tensor = state["master"]
    torch.where(master.to(param.dtype) == param, master, param.to(master.dtype), out=master)
    return master
