"""LARS: one learning rate per layer, for SGD with very large batches (You et al. 2017, arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..keys import key, names, number
from ..slots import Part, Risk, Site, Slot, not_available


@dataclass(frozen=True, kw_only=True)
class Lars(Part):
    name: ClassVar[str] = "lars"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    available: ClassVar[bool] = False
    why: ClassVar[str] = "LARS scales each layer's step and folds the learning rate into its momentum."

    lars_coeff: float = key(0.001, number(above=0.0), "trust coefficient: how far a layer may move relative to its norm")
    lars_weight_decay: float = key(0.0005, number(0.0), "weight decay inside the trust ratio")
    epsilon: float = key(0.0, number(0.0), "added to the denominator of the trust ratio")
    # Two words carry a meaning beyond the name: "norm" is every norm layer whatever it is called, "bias" every bias.
    # Paddle's spellings of the two, "batch_norm" and ".b_0", are understood as well.
    exclude_from_weight_decay: list[str] = key(
        ["norm", "bias"], names(), 'parts of parameter names without decay; "norm" and "bias" mean norm layers and biases'
    )

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.UPDATE, Slot.MOMENTUM})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        raise not_available(self.name)

    @classmethod
    def neutral(cls) -> None:
        return None
