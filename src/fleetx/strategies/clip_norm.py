"""Clip the reduced gradients by their global norm, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ..config.kinds import key, number
from ..engine.slots import Part, Risk, Site, Slot

EPSILON = 1e-6
"""Added to the norm, as torch.nn.utils.clip_grad_norm_ does."""


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, at most 1, that brings a gradient of this norm down to `max_norm`."""
    return torch.clamp(max_norm / (norm + EPSILON), max=1.0)


@final
class GlobalNormClip:
    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def __call__(self, flats: Sequence[Tensor], norm: Tensor) -> Tensor:
        factor = clip_factor(norm, self.max_norm)
        for flat in flats:
            flat.mul_(factor.to(flat.dtype))
        return factor


@dataclass(frozen=True, kw_only=True)
class ClipNorm(Part):
    """Limit the global norm of the reduced gradients.

    Examples:
        >>> strategy = fleet.DistributedStrategy(clip_norm=X.strategies.ClipNorm(max_norm=0.5))
        >>> strategy.clip_norm_configs["max_norm"]
        0.5
    """

    name: ClassVar[str] = "clip_norm"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    why: ClassVar[str] = "It limits the reduced gradients."

    max_norm: float = key(1.0, number(above=0.0), "largest global norm of the reduced gradients")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.CLIP})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        return {Slot.CLIP: GlobalNormClip(self.max_norm)}

    @classmethod
    def neutral(cls) -> dict[str, Any]:
        return {"max_norm": 1e30}
