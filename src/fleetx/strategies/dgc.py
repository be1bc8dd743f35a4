"""Deep gradient compression: send the few largest entries, keep the rest for later (Lin et al. 2018, arXiv 1712.01887)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch.optim import Optimizer

from ..config.kinds import boolean, integer, key, number, numbers, optional
from ..dist.predicted_cost import ENTRY_BYTES, Cost, Link, Shape, break_even_ranks, numel, sparse, times_less
from ..engine.setup.optimizer_swap import require_inner, take_over
from ..engine.slots import Part, PlanContext, Risk, Site, Slot
from ..errors import ConfigError
from ..reduce.dgc import Ramp, SGDHandedOver, SparseReduce


@dataclass(frozen=True, kw_only=True)
class DGC(Part):
    """Send the few largest entries of each gradient and keep the rest for later updates.

    Examples:
        >>> strategy = fleet.DistributedStrategy(dgc=X.strategies.DGC(sparsity=[0.99]))
        >>> strategy.dgc_configs["sparsity"]
        [0.99]
    """

    name: ClassVar[str] = "dgc"
    risk_class: ClassVar[Risk] = Risk.LOSSY
    inner: ClassVar[tuple[type[Optimizer], ...]] = (torch.optim.SGD,)
    overlaps_backward: ClassVar[bool] = False
    label_key: ClassVar[str] = "sparsity"
    why: ClassVar[str] = "DGC applies momentum and clips before sending."

    rampup_begin_step: int = key(0, integer(0), "updates that stay dense at the start")
    rampup_step: int = key(1, integer(1), "updates over which the sparsity list is walked through")
    sparsity: list[float] = key(
        [0.999], numbers(number(0.0, below=1.0), ascending=True), "shares of the entries that are kept back, in order"
    )
    min_numel: int = key(16384, integer(1), "tensors with fewer elements stay dense")
    clip_norm: float | None = key(
        None, optional(number(above=0.0)), "of each worker's own gradient, scaled by N**-0.5; not in dense updates"
    )
    two_level: bool = key(False, boolean(), "dense inside a node, sparse between nodes")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.SHARD, Slot.REDUCE, Slot.MOMENTUM, Slot.CLIP})

    def check(self, site: Site) -> None:
        require_inner(self, site.optimizer, write="torch.optim.SGD(model.parameters(), lr=..., momentum=0.9)")
        for place, group in enumerate(site.optimizer.param_groups):
            for name in ("dampening", "maximize", "differentiable"):
                if group.get(name):
                    raise ConfigError(
                        f"strategy.dgc takes over SGD's momentum, weight_decay and nesterov, and knows no {name}; group {place} "
                        f"of the optimizer has {name}={group[name]!r}. Leave it out."
                    )

    def build(self, site: Site) -> Mapping[Slot, Any]:
        assert isinstance(site.optimizer, torch.optim.SGD)
        update = SGDHandedOver(site.optimizer)
        take_over(site.optimizer, update, {})
        reduce = SparseReduce(
            site,
            update,
            ramp=Ramp(self.rampup_begin_step, self.rampup_step, tuple(self.sparsity)),
            min_numel=self.min_numel,
            clip_norm=self.clip_norm,
            two_level=self.two_level,
        )
        return {Slot.REDUCE: reduce, Slot.UPDATE: update}

    def notes(self) -> list[str]:
        last, first = self.sparsity[-1], next((one for one in self.sparsity if one), 0.0)
        if not last:
            return []
        unclipped = ", and not clipped" if self.clip_norm is not None else ""
        dense = [f"updates 1 to {self.rampup_begin_step} are dense{unclipped}."] if self.rampup_begin_step else []
        who = "nodes" if self.two_level else "ranks"
        even, gains = break_even_ranks(last), [f"{times_less(last, n):,.3g} times less among {n}" for n in (2, 8, 32)]
        sparse = (
            f"{1 - last:.4g} of the entries of each large tensor are sent, {ENTRY_BYTES} bytes each, to all other {who}: "
            f"{', '.join(gains)} than a dense all-reduce sends. Beyond {even:,.0f} {who} (1 / density) it sends more."
        )
        ramp = f"its first sparse updates, at {first:g}, send more than dense ones beyond {break_even_ranks(first):,.3g} {who}."
        return [*dense, sparse, *([ramp] if first != last else [])]

    def no_effect(self) -> str | None:
        if any(self.sparsity):
            return None
        return (
            'dgc has no effect with a sparsity of 0: every update is dense. Write strategy.dgc_configs = {"sparsity": [0.999]}.'
        )

    @classmethod
    def candidates(cls, context: PlanContext) -> Sequence[Self]:
        return [cls(sparsity=[0.999])]

    def wire_cost(self, shapes: Sequence[Shape], link: Link) -> Cost:
        large = [shape for shape in shapes if math.prod(shape) >= self.min_numel]
        return sparse(numel(large), link, sparsity=self.sparsity[-1], dense_numel=numel(shapes) - numel(large))

    def steady(self, updates_per_exchange: int = 1) -> Self:
        return replace(self, rampup_begin_step=0, rampup_step=1, sparsity=self.sparsity[-1:])

    @classmethod
    def neutral(cls) -> dict[str, Any]:
        return {"rampup_begin_step": 10**9}
