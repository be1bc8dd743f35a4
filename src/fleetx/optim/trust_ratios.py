"""The trust ratios of one update: kept on the device, read when somebody looks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class TrustRatios:
    """By how much each adapted tensor's step was scaled. Making this never waits for the device; reading a value does."""

    def __init__(self, names: Sequence[str | None], values: Sequence[Tensor]) -> None:
        """`values`: vectors that together hold one number per name; None is the name of a tensor that is not adapted."""
        self._names, self._values = names, values

    @functools.cached_property
    def by_name(self) -> dict[str, float]:
        return self.named(torch.cat([v.detach().reshape(-1).double().cpu() for v in self._values]))

    def on_device(self) -> Tensor:
        """All of them, for those who cannot wait for the device; `named` tells them apart later."""
        return torch.cat([v.detach().reshape(-1).double() for v in self._values])

    def named(self, ratios: Tensor) -> dict[str, float]:
        return {name: number for name, number in zip(self._names, ratios.tolist(), strict=True) if name is not None}

    @property
    def layer_min(self) -> str:
        return min(self.by_name, key=lambda name: self.by_name[name])

    @property
    def layer_max(self) -> str:
        return max(self.by_name, key=lambda name: self.by_name[name])

    @property
    def min(self) -> float:
        return self.by_name[self.layer_min]

    @property
    def max(self) -> float:
        return self.by_name[self.layer_max]

    @property
    def median(self) -> float:
        ordered = sorted(self.by_name.values())
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

    def __len__(self) -> int:
        return sum(name is not None for name in self._names)

    def __repr__(self) -> str:
        return (
            f"TrustRatios(min {self.min:.3g} in {self.layer_min}, median {self.median:.3g}, "
            f"max {self.max:.3g} in {self.layer_max}, {len(self)} tensors)"
        )
