"""Deep gradient compression: send the few largest entries, keep the rest for later (Lin et al. 2018, arXiv 1712.01887)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..keys import integer, key, number, numbers, optional
from ..slots import Part, Risk, Site, Slot, not_available


@dataclass(frozen=True, kw_only=True)
class DGC(Part):
    name: ClassVar[str] = "dgc"
    risk_class: ClassVar[Risk] = Risk.LOSSY
    available: ClassVar[bool] = False
    why: ClassVar[str] = "DGC applies momentum and clips before sending."

    rampup_begin_step: int = key(0, integer(0), "updates that stay dense at the start")
    rampup_step: int = key(1, integer(1), "updates over which the sparsity list is walked through")
    sparsity: list[float] = key(
        [0.999], numbers(number(0.0, below=1.0), ascending=True), "shares of the entries that are kept back, in order"
    )
    min_numel: int = key(16384, integer(1), "tensors with fewer elements stay dense")
    clip_norm: float | None = key(None, optional(number(above=0.0)), "local clipping threshold, scaled by N**-0.5")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.REDUCE, Slot.MOMENTUM, Slot.CLIP})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        raise not_available(self.name)

    @classmethod
    def neutral(cls) -> dict[str, Any]:
        return {"rampup_begin_step": 10**9}
