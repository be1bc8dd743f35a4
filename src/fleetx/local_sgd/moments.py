"""Average optimizer state in a round (`average_state`): moments become the mean, step counts the largest.

A rank that has skipped its first updates has no state yet. The ranks compare hashes of their layouts; where these differ, the
round leaves the state as it is, on all ranks.
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
"""Key of the step count. Other single numbers (a product of past factors) belong to their rank's own count, and stay."""
MASTER = "master"
"""Key of a parameter's float32 copy, which is averaged as the parameter and not as state."""


@final
class Moments:
    """Average the state of one optimizer."""

    def __init__(self, params: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._params, self.optimizer = params, optimizer
        self._flat: Tensor | None = None
        self._counts: Tensor | None = None

    def _averaged_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the state's tensors and its step counts, in one order on every rank."""
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

    def layout_hash(self) -> float:
        """Hash names, shapes and types of the state; ranks with equal hashes can average."""
        tensors, numbers = self._averaged_state()
        layout = "\n".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in [*tensors.items(), *numbers.items()])
        return float(int.from_bytes(hashlib.sha256(layout.encode()).digest()[:6], "big"))

    def launch(self, share: float, comm: Comm) -> list[Pending]:
        """Send this rank's state, its moments multiplied by `share`."""
        tensors, numbers = self._averaged_state()
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
        """Write the mean, once it has arrived."""
        tensors, numbers = self._averaged_state()
        if self._flat is not None:
            parts = self._flat.split([t.numel() for t in tensors.values()])
            torch._foreach_copy_(list(tensors.values()), [p.view(t.shape) for p, t in zip(parts, tensors.values(), strict=True)])
        if self._counts is not None:
            for number, largest in zip(numbers.values(), self._counts, strict=True):
                number.copy_(largest)
        self._flat = self._counts = None
