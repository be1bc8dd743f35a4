"""PowerSGD: gradients travel as low-rank factors, the error is kept for later (Vogels et al. 2019, arXiv 1905.13727)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..config.kinds import boolean, integer, key, number
from ..dist.predicted_cost import Cost, Link, Shape, as_matrix, low_rank, low_rank_times_less, numel
from ..engine.slots import Part, PlanContext, Risk, Site, Slot
from ..reduce.powersgd import LowRankReduce, is_smaller


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Part):
    """Send low-rank factors of each gradient and keep the error for later updates.

    Examples:
        >>> strategy = fleet.DistributedStrategy(powersgd=X.strategies.PowerSGD(rank=8))
        >>> strategy.powersgd_configs["rank"]
        8
    """

    name: ClassVar[str] = "powersgd"
    risk_class: ClassVar[Risk] = Risk.LOSSY
    overlaps_backward: ClassVar[bool] = False
    label_key: ClassVar[str] = "rank"
    why: ClassVar[str] = "PowerSGD sends low-rank factors in place of the gradients."

    rank: int = key(4, integer(1), "rank of the factors: more is closer to the gradient, and more bytes")
    begin_step: int = key(10, integer(0), "updates that stay dense at the start")
    min_compression: float = key(2.0, number(above=0.0), "tensors that would shrink by less than this stay dense")
    two_level: bool = key(False, boolean(), "dense inside a node, low-rank factors between nodes")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.REDUCE})

    def build(self, site: Site) -> Mapping[Slot, Any]:
        reduce = LowRankReduce(
            site,
            rank=self.rank,
            dense_updates=self.begin_step,
            min_compression=self.min_compression,
            two_level=self.two_level,
        )
        return {Slot.REDUCE: reduce}

    def notes(self) -> list[str]:
        gains = [f"{low_rank_times_less(n, n, self.rank):,.3g} times less of {n} x {n}" for n in (256, 1024, 4096)]
        dense = [f"updates 1 to {self.begin_step} are dense."] if self.begin_step else []
        return [
            *dense,
            f"of a matrix two factors of rank {self.rank} are sent, whatever the number of ranks: {', '.join(gains)}. Smaller "
            "gains than min_compression, and tensors of one dimension, stay dense.",
        ]

    @classmethod
    def candidates(cls, context: PlanContext) -> Sequence[Self]:
        return [cls(rank=4)]

    def wire_cost(self, shapes: Sequence[Shape], link: Link) -> Cost:
        matrices = [matrix for shape in shapes if self._takes(matrix := as_matrix(shape))]
        return low_rank(matrices, link, rank=self.rank, dense_numel=numel(shapes) - numel(matrices))

    def _takes(self, matrix: tuple[int, int]) -> bool:
        return is_smaller(matrix, rank=self.rank, min_compression=self.min_compression)

    def steady(self, updates_per_exchange: int = 1) -> Self:
        return replace(self, begin_step=0)

    @classmethod
    def neutral(cls) -> dict[str, Any]:
        return {"begin_step": 10**9}
