"""Gradients travel as float16: half the bytes of float32. The mean is taken before the cast, so sums cannot overflow first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..dist.predicted_cost import Cost, Link, Shape, dense, numel
from ..engine.slots import Part, Risk, Site, Slot
from ..reduce.narrow import NarrowAllReduce


@dataclass(frozen=True, kw_only=True)
class FP16AllReduce(Part):
    """Send gradients as float16: half the bytes of float32.

    Examples:
        >>> fleet.DistributedStrategy(fp16_allreduce=X.strategies.FP16AllReduce()).fp16_allreduce
        True
    """

    name: ClassVar[str] = "fp16_allreduce"
    risk_class: ClassVar[Risk] = Risk.ROUNDING
    planning_note: ClassVar[str] = "was not tried: it sends as much as bf16_allreduce, which stands for both, and may overflow."
    why: ClassVar[str] = "It decides how gradients travel."

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.REDUCE})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        return {Slot.REDUCE: NarrowAllReduce(site.comm, torch.float16)}

    def wire_cost(self, shapes: Sequence[Shape], link: Link) -> Cost:
        return dense(numel(shapes), link, item_bytes=2)

    @classmethod
    def neutral(cls) -> dict[str, Any] | None:
        return None
