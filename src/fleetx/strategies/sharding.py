"""Sharding: each rank has the optimizer's state of its share of the model, and makes that share of the update (ZeRO 1 and 2).

Rajbhandari et al. 2020, arXiv 1910.02054.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import optim

from ..config.kinds import integer, key, optional
from ..engine.slots import Part, Risk, Site, Slot
from ..errors import ConfigError
from ..shard.zero import Groups, ShardedUpdate

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
"""Optimizers in which an element's new value depends on nothing but that element's own history."""


@dataclass(frozen=True, kw_only=True)
class Sharding(Part):
    """Divide the optimizer's state, and the update, between the ranks.

    Examples:
        >>> strategy = fleet.DistributedStrategy(sharding=X.strategies.Sharding(stage=1))
        >>> strategy.sharding_configs["stage"]
        1
    """

    name: ClassVar[str] = "sharding"
    risk_class: ClassVar[Risk] = Risk.ROUNDING
    planning_note: ClassVar[str] = "It saves memory of the optimizer's state, which a plan does not weigh yet."
    why: ClassVar[str] = "Sharding needs one mean of all ranks' gradients, and one owner of each part of the optimizer's state."

    stage: int = key(1, integer(1, 2), "what is divided: 1, the optimizer's state; 2, the gradients too")
    sharding_degree: int | None = key(
        None, optional(integer(1)), "ranks that divide one state between them, neighbours; None: all ranks of the run"
    )

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.SHARD})

    def check(self, site: Site) -> None:
        kind = type(site.optimizer)
        if kind not in ELEMENTWISE:
            names = ", ".join(cls.__name__ for cls in ELEMENTWISE)
            raise ConfigError(
                f"strategy.sharding gives the optimizer parts of tensors, and {kind.__name__} may need them whole. It works with "
                f"these of torch.optim, and with strategy.lars, strategy.lamb and strategy.muon on top of them: {names}."
            )
        degree, ranks = self.sharding_degree, site.comm.size
        if degree is not None and (degree > ranks or ranks % degree):
            raise ConfigError(
                f'sharding_configs["sharding_degree"] is {degree}, and this run has {ranks} ranks. Write a number that divides '
                f"{ranks}, or None for all of them."
            )
        for name, param in site.params.items():
            if not torch.ops.aten.is_non_overlapping_and_dense(param):
                raise ConfigError(
                    f"`{name}` has gaps between its elements, or elements that share memory, and strategy.sharding divides "
                    "memory. Make it dense before the optimizer is built: param.data = param.data.contiguous()."
                )

    def build(self, site: Site) -> Mapping[Slot, Any]:
        if site.comm.size == 1 or self.sharding_degree == 1:
            return {}  # one rank has all of it
        return {Slot.SHARD: ShardedUpdate(Groups.of(site.comm, self.sharding_degree), frees=self.stage == 2)}

    def notes(self) -> list[str]:
        return [
            "of the optimizer's state each rank has its share; gradients and new weights together send what an all-reduce sends.",
            "after backward `param.grad` shows the norm of the whole gradient, and can be clipped and scaled; its numbers are "
            "not all on this rank. optimizer.state_dict() is called on every rank.",
            *(
                ["stage 2: memory of a bucket's gradients is given back when it is sent; inside a merge window it stays."]
                if self.stage == 2
                else []
            ),
        ]

    def no_effect(self) -> str | None:
        if self.sharding_degree == 1:
            return "strategy.sharding has no effect with sharding_degree 1: each rank has the whole state. Write None, or 2."
        return None

    @classmethod
    def neutral(cls) -> dict[str, Any]:
        return {"stage": 1}
