"""Gradient merge: k micro-batches, one reduce, one update. The batch grows by k, the memory does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config.kinds import boolean, integer, key
from ..engine.slots import Merge, Part, Risk, Site, Slot


@dataclass(frozen=True, kw_only=True)
class GradientMerge(Part):
    """Add up the gradients of several micro-batches before one update: a larger batch in the same memory.

    Examples:
        >>> strategy = fleet.DistributedStrategy(gradient_merge=X.strategies.GradientMerge(k_steps=4))
        >>> strategy.gradient_merge_configs["k_steps"]
        4
    """

    name: ClassVar[str] = "gradient_merge"
    risk_class: ClassVar[Risk] = Risk.EXACT
    why: ClassVar[str] = "It decides how many micro-batches make one update."

    k_steps: int = key(1, integer(1), "micro-batches that make one update")
    avg: bool = key(True, boolean(), "mean over the micro-batches; False sums them, and the learning rate is yours to cut")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.MERGE})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        return {Slot.MERGE: Merge(micro_steps=self.k_steps, mean=self.avg)}

    def no_effect(self) -> str | None:
        if self.k_steps > 1:
            return None
        return 'gradient_merge has no effect with k_steps = 1. Write strategy.gradient_merge_configs = {"k_steps": 4}.'

    @classmethod
    def neutral(cls) -> dict[str, Any]:
        return {"k_steps": 1}
