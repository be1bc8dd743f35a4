"""Optimizer state at an averaging, where that is asked for: moments are averaged, counters of steps become the largest.

A rank that has skipped its first updates has no state yet. The ranks compare marks of their layouts; where these differ
this round leaves the state alone, on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dist.comm import Comm, Pending
from ..engine.bucket import wide_type

STEP = "step"
"""A count of updates. Other single numbers (a product of past factors) mean nothing without their rank's own count: they stay."""
MASTER = "master"
"""A parameter's float32 copy: averaged as the parameter, not as state."""


@final
class Moments:
    def __init__(self, params: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._params, self.optimizer = params, optimizer
        self._flat: Tensor | None = None
        self._counts: Tensor | None = None

    def _found(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Tensors of the state, and its counts of steps, in one order on every rank."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Tensor] = {}
        for name, param in self._params.items():
            held = self.optimizer.state.get(param, {})
            for key in sorted(map(str, held)):
                value = held[key]
                if not isinstance(value, Tensor) or not value.is_floating_point() or key == MASTER:
                    continue
                if value.dim():
                    tensors[f"{name}/{key}"] = value
                elif key == STEP:
                    numbers[f"{name}/{key}"] = value
        return tensors, numbers

    def mark(self) -> float:
        """Of the layout; equal marks can be averaged."""
        tensors, numbers = self._found()
        told = "\n".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in [*tensors.items(), *numbers.items()])
        return float(int.from_bytes(hashlib.sha256(told.encode()).digest()[:6], "big"))

    def launch(self, share: float, comm: Comm) -> list[Pending]:
        tensors, numbers = self._found()
        pending = []
        if tensors:
            wide = max((wide_type(t.dtype) for t in tensors.values()), key=lambda dtype: dtype.itemsize)
            self._flat = torch.cat([t.detach().reshape(-1).to(wide) for t in tensors.values()]).mul_(share)
            pending.append(comm.all_reduce(self._flat))
        if numbers:
            self._counts = torch.stack([t.detach().double().to(comm.control_device) for t in numbers.values()])
            pending.append(comm.all_reduce(self._counts, "max"))
        return pending

    def settle(self) -> None:
        tensors, numbers = self._found()
        if self._flat is not None:
            parts = self._flat.split([t.numel() for t in tensors.values()])
            torch._foreach_copy_(list(tensors.values()), [p.view(t.shape) for p, t in zip(parts, tensors.values(), strict=True)])
        if self._counts is not None:
            for number, largest in zip(numbers.values(), self._counts, strict=True):
                number.copy_(largest)
        self._flat = self._counts = None
