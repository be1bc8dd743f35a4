"""Auto: measure the model and the network, then choose the strategy and say why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..keys import choice, integer, key, optional, size
from ..slots import Part, Risk, Site, Slot, not_available


@dataclass(frozen=True, kw_only=True)
class Auto(Part):
    name: ClassVar[str] = "auto"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    available: ClassVar[bool] = False
    why: ClassVar[str] = "Auto chooses the parts itself."

    risk: str = key("rounding", choice(*(r.value for r in Risk)), "the riskiest class of part it may choose")
    trials: int = key(3, integer(1), "candidates that are run for some real steps")
    memory: int | None = key(None, optional(size()), "peak memory to stay under; None is what the device has")

    def claims(self) -> frozenset[Slot]:
        return frozenset()

    def build(self, site: Site) -> Mapping[Slot, Any]:
        raise not_available(self.name)

    @classmethod
    def neutral(cls) -> None:
        return None
