"""LAMB: one trust ratio per layer, for Adam with very large batches (You et al. 2020, arXiv 1904.00962)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..keys import boolean, key, names, number
from ..slots import Part, Risk, Site, Slot, not_available


@dataclass(frozen=True, kw_only=True)
class Lamb(Part):
    name: ClassVar[str] = "lamb"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    available: ClassVar[bool] = False
    why: ClassVar[str] = "LAMB scales each layer's step by moments that it keeps itself."

    lamb_weight_decay: float = key(0.01, number(0.0), "weight decay, added to the Adam direction before the trust ratio")
    # Two words carry a meaning beyond the name: "norm" is every norm layer whatever it is called, "bias" every bias.
    # Paddle's spellings of the two, "batch_norm" and ".b_0", are understood as well.
    exclude_from_weight_decay: list[str] = key(
        ["norm", "bias"], names(), 'parts of parameter names without decay; "norm" and "bias" mean norm layers and biases'
    )
    always_adapt: bool = key(False, boolean(), "scale tensors without weight decay too")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.UPDATE, Slot.MOMENTUM})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        raise not_available(self.name)

    @classmethod
    def neutral(cls) -> None:
        return None
