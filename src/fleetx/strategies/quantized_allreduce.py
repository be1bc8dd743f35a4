"""Gradients travel as integers of 8 or 4 bits with a scale for each block, both ways; what rounding loses is sent later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..config.kinds import boolean, integer, integer_among, key
from ..dist.codec import Codec
from ..dist.predicted_cost import Cost, Link, Shape, numel, quantised
from ..engine.slots import Part, PlanContext, Risk, Site, Slot
from ..reduce.quantized import QuantisedReduce, travels_whole


@dataclass(frozen=True, kw_only=True)
class QuantizedAllReduce(Part):
    """Send gradients as blockwise integers, and keep the rounding error for later updates.

    Examples:
        >>> strategy = fleet.DistributedStrategy(quantized_allreduce=X.strategies.QuantizedAllReduce(bits=4))
        >>> strategy.quantized_allreduce_configs["bits"]
        4
    """

    name: ClassVar[str] = "quantized_allreduce"
    risk_class: ClassVar[Risk] = Risk.LOSSY
    label_key: ClassVar[str] = "bits"
    why: ClassVar[str] = "It sends integers in place of the gradients."

    bits: int = key(8, integer_among(8, 4), "bits of each number on the wire")
    block: int = key(256, integer(16, multiple_of=8), "numbers that share a scale, which is 16 bits")
    error_feedback: bool = key(True, boolean(), "what rounding loses is added to the next gradient; else it is gone")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.REDUCE})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        codec = Codec(self.bits, self.block)
        return {Slot.REDUCE: QuantisedReduce(site, codec, error_feedback=self.error_feedback)}

    def notes(self) -> list[str]:
        bits = self.bits + 16 / self.block
        kept = "what they miss is added to the next gradient" if self.error_feedback else "what they miss is gone"
        return [
            f"{bits:.4g} bits a number travel both ways, {32 / bits:.3g} times less than float32; {kept}. Tensors of one "
            "dimension that are small stay float32."
        ]

    @classmethod
    def candidates(cls, context: PlanContext) -> Sequence[Self]:
        return [cls(bits=8), cls(bits=4)]

    def wire_cost(self, shapes: Sequence[Shape], link: Link) -> Cost:
        whole = numel([shape for shape in shapes if travels_whole(shape)])
        return quantised(numel(shapes), link, bits=self.bits, block=self.block, dense_numel=whole)

    @classmethod
    def neutral(cls) -> dict[str, Any] | None:
        return None
