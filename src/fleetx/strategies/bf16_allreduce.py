"""Gradients travel as bfloat16: half the bytes of float32. The mean is taken before the cast, so sums cannot overflow first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from ..dist.predicted_cost import Cost, Link, Shape, dense, numel
from ..engine.slots import Part, PlanContext, Risk, Site, Slot
from ..reduce.narrow import NarrowAllReduce


@dataclass(frozen=True, kw_only=True)
class BF16AllReduce(Part):
    """Send gradients as bfloat16: half the bytes of float32.

    Examples:
        >>> fleet.DistributedStrategy(bf16_allreduce=X.strategies.BF16AllReduce()).bf16_allreduce
        True
    """

    name: ClassVar[str] = "bf16_allreduce"
    risk_class: ClassVar[Risk] = Risk.ROUNDING
    why: ClassVar[str] = "It decides how gradients travel."

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.REDUCE})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        return {Slot.REDUCE: NarrowAllReduce(site.comm, torch.bfloat16)}

    @classmethod
    def candidates(cls, context: PlanContext) -> Sequence[Self]:
        return [cls()]

    def wire_cost(self, shapes: Sequence[Shape], link: Link) -> Cost:
        return dense(numel(shapes), link, item_bytes=2)

    @classmethod
    def neutral(cls) -> dict[str, Any] | None:
        return None
