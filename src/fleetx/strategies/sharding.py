"""Sharding: each rank has the optimizer's state of its share of the model, and makes that share of the update (ZeRO 1 to 3).

Rajbhandari et al. 2020, arXiv 1910.02054.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import optim

from ..config.kinds import boolean, integer, key, optional
from ..dist.fully_sharded import is_fully_sharded
from ..engine.slots import Part, PlanContext, Risk, Site, Slot
from ..errors import ConfigError
from ..recompute.units import natural_units
from ..shard.divided import Groups
from ..shard.fsdp import FullyShardedUpdate, divide, groups_of, refuse_other_division, refuse_unfit
from ..shard.zero import ShardedUpdate
from .recompute import Recompute

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
    planning_note: ClassVar[str] = "It is for an optimizer's state that does not fit; of gradients and weights see its stages."
    hidden_part: ClassVar[float] = 0.5
    why: ClassVar[str] = "Sharding needs one mean of all ranks' gradients, and one owner of each part of the optimizer's state."

    stage: int = key(1, integer(1, 3), "what is divided: 1, the optimizer's state; 2, the gradients too; 3, the weights too")
    merge_sharded: bool = key(
        False, boolean(), "stage 2: reduce every micro-step of a merge window, and keep this rank's share of its sums alone"
    )
    sharding_degree: int | None = key(
        None, optional(integer(1)), "ranks that divide one state between them, neighbours; None: all ranks of the run"
    )

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.SHARD})

    @property
    def divides_weights(self) -> bool:
        return self.stage == 3

    def check(self, site: Site) -> None:
        is_divided = is_fully_sharded(site.model)
        if is_divided and self.stage != 3:
            raise ConfigError(
                f"the model is sharded by fully_shard, which is stage 3 of strategy.sharding, and the stage is "
                f'{self.stage}. Write strategy.sharding_configs = {{"stage": 3}}; or leave fully_shard out.'
            )
        if self.merge_sharded and self.stage == 1:
            raise ConfigError(
                'sharding_configs["merge_sharded"] is True, and stage 1 keeps whole gradients. Write '
                'strategy.sharding_configs = {"stage": 2, "merge_sharded": True}, or leave merge_sharded out.'
            )
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
        if self.stage == 3:
            return self._check_weights(site, is_divided=is_divided)
        for name, param in site.params.items():
            if not torch.ops.aten.is_non_overlapping_and_dense(param):
                raise ConfigError(
                    f"`{name}` has gaps between its elements, or elements that share memory, and strategy.sharding divides "
                    "memory. Make it dense before the optimizer is built: param.data = param.data.contiguous()."
                )

    def _check_weights(self, site: Site, *, is_divided: bool) -> None:
        for part in site.parts:
            why = _why_not(part)
            if why is not None:
                raise ConfigError(f"strategy.{part.name} beside strategy.sharding of stage 3: {why}")
        if is_divided:
            refuse_other_division(site.params, site.comm, site.device, degree=self.sharding_degree)
        else:
            refuse_unfit(site.params)

    def place(self, site: Site) -> None:
        if self.stage != 3 or self._has_all(site) or is_fully_sharded(site.model):
            return
        modules = dict(site.model.named_modules())
        blocks = [modules[name] for name in natural_units(site.model) if name in modules]
        divide(site.model, site.optimizer, blocks, site.comm, degree=self.sharding_degree, device=site.device)

    def _has_all(self, site: Site) -> bool:
        """Return whether each rank has all of it by these settings."""
        return site.comm.size == 1 or self.sharding_degree == 1

    def build(self, site: Site) -> Mapping[Slot, Any]:
        if is_fully_sharded(site.model):
            return {Slot.SHARD: FullyShardedUpdate(groups_of(site.model, site.comm), site.model)}
        if self._has_all(site):
            return {}
        return {
            Slot.SHARD: ShardedUpdate(
                Groups.of(site.comm, self.sharding_degree), frees=self.stage == 2, merges_shares=self.merge_sharded
            )
        }

    def notes(self) -> list[str]:
        if self.stage == 3:
            return [
                "stage 3: each rank has its rows of weights, gradients and the optimizer's state (torch's fully_shard); a "
                "block's weights are gathered for its forward and its backward: half as many bytes again as an all-reduce sends.",
                "inside a merge window gradients are reduced in every micro-step, so that each rank keeps its rows alone: "
                "k_steps times the messages of a window that reduces once.",
                "every forward needs all ranks, in evaluation too; param.grad is a DTensor, which clip_grad_norm_ takes.",
            ]
        return [
            "of the optimizer's state each rank has its share; gradients and new weights together send what an all-reduce sends.",
            "after backward `param.grad` shows the norm of the whole gradient, and can be clipped and scaled; its numbers are "
            "not all on this rank. optimizer.state_dict() is called on every rank.",
            *(
                [
                    "stage 2: memory of a bucket's gradients is given back when it is sent; "
                    + (
                        "each micro-step of a merge window is sent by itself, k_steps times the bytes of gradients."
                        if self.merge_sharded
                        else "inside a merge window it stays, since sums are sent once (merge_sharded: in each micro-step)."
                    )
                ]
                if self.stage == 2
                else []
            ),
        ]

    def no_effect(self) -> str | None:
        if self.sharding_degree == 1:
            return "strategy.sharding has no effect with sharding_degree 1: each rank has the whole state. Write None, or 2."
        return None

    @classmethod
    def candidates(cls, context: PlanContext) -> Sequence[Self]:
        return [cls()] if context.lacks_memory else []

    def kept_bytes(self, *, state_bytes: int, ranks: int) -> int:
        return state_bytes // (self.sharding_degree or ranks) - state_bytes

    @classmethod
    def neutral(cls) -> dict[str, Any]:
        return {"stage": 1}


def _why_not(part: Part) -> str | None:
    """Return what a part cannot do where FSDP reduces gradients and gathers weights itself, with what to write; None: it can."""
    if Slot.REDUCE in part.claims():
        return f"fully_shard reduces gradients itself, inside backward. Leave strategy.{part.name} out, or use stage 1."
    if isinstance(part, Recompute) and (part.budget is not None or part.offload):
        return 'its plans are made by steps that each rank runs alone. Name modules in recompute_configs["checkpoints"].'
    return NOT_BESIDE_WEIGHTS.get(part.name)


NOT_BESIDE_WEIGHTS = {
    "muon": "it orthogonalises whole matrices, of which each rank has some rows alone. Use stage 1 or 2.",
    "compile": "its graphs hold the weights as they are at first. Leave strategy.compile out, or use stage 1 or 2.",
    "sync_batch_norm": "its messages would lie between those of fully_shard in backward. Use stage 1 or 2, or layers without it.",
}
"""Parts whose slots do not tell it."""
