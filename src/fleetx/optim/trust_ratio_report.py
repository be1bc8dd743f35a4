"""Hold the trust ratios of one update on the device until they are read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class TrustRatios:
    """Factors on the steps of adapted tensors. Creating this never waits for the device; reading a value does.

    Examples:
        >>> ratios = X.optim.TrustRatios(["first", "second"], [torch.tensor([0.5, 2.0])])
        >>> ratios.by_name, ratios.layer_max
        ({'first': 0.5, 'second': 2.0}, 'second')
    """

    def __init__(self, names: Sequence[str | None], values: Sequence[Tensor]) -> None:
        """Hold `values`, vectors with one number per name in all; the name of a tensor that is not adapted is None."""
        self._names, self._values = names, values

    @functools.cached_property
    def by_name(self) -> dict[str, float]:
        return self.named(torch.cat([v.detach().reshape(-1).double().cpu() for v in self._values]))

    def on_device(self) -> Tensor:
        """Return all ratios as one vector, without waiting for the device; `named` assigns them to names later."""
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
