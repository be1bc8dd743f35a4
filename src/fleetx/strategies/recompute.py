"""Recompute: drop activations in forward, compute them again in backward (Chen et al. 2016, arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import log
from ..config.kinds import boolean, key, names, optional, size
from ..dist.agree import ranks_where
from ..engine.dry_run import Rehearsal
from ..engine.modules.compiling import compiled_by
from ..engine.modules.patching import patch_forward
from ..engine.slots import Part, Risk, Site, Slot
from ..errors import ConfigError
from ..recompute.host_memory import mover_for, warn_of_no_offload
from ..recompute.memory_probe import require_countable
from ..recompute.offload import Offload
from ..recompute.plan import plan_for
from ..recompute.planner import Planner
from ..recompute.replay import Replay
from ..recompute.units import chosen_units
from .compile import Compile


@dataclass(frozen=True, kw_only=True)
class Recompute(Part):
    """Drop the activations of blocks in forward and compute them again in backward, which saves memory.

    Examples:
        >>> strategy = fleet.DistributedStrategy(recompute=X.strategies.Recompute(budget="20GB"))
        >>> strategy.recompute_configs["budget"]
        20000000000
    """

    name: ClassVar[str] = "recompute"
    risk_class: ClassVar[Risk] = Risk.EXACT
    why: ClassVar[str] = "Recompute patches the forward of the blocks it drops."

    checkpoints: list[str] = key(
        [], names("layer1.0", "layer1.1"), "names or patterns of the modules to recompute; empty means every repeated block"
    )
    budget: int | None = key(None, optional(size()), "peak memory to stay under; the plan is then computed")
    offload: bool = key(False, boolean(), "keep the inputs of recomputed blocks in host memory")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.MODULE})

    def check(self, site: Site) -> None:
        without = ranks_where(site.comm, not site.has_sample)
        if self.budget is not None and without:
            given = "given no batch" if len(without) == site.comm.size else f"given no batch on ranks {without}"
            raise ConfigError(
                f'recompute_configs["budget"] is {self.budget}: a plan is made by running steps, and fleet.distribute(...) was '
                f"{given}. Write model, optimizer = fleet.distribute(model, optimizer, strategy, sample=batch), with "
                "loss_fn=lambda model, batch: ... where the model has no method loss(batch)."
            )
        if self.budget is not None:
            _refuse_one_piece(site)
        chosen_units(site.model, self.checkpoints)

    def cuts_graphs(self, *, by_user: bool) -> str | None:
        if not by_user or (self.budget is None and not self.offload):
            return None
        what = 'recompute_configs["budget"]' if self.budget is not None else 'recompute_configs["offload"]'
        return (
            f"{what} decides around each unit what is kept, so compiled code ends before a unit and begins again after it. Name "
            'the modules in "checkpoints" instead, without a budget and without offload, which one graph can hold.'
        )

    def build(self, site: Site) -> Mapping[Slot, Any]:
        mover = mover_for(site.device) if self.offload else None
        if self.offload and mover is None and site.comm.rank == 0:
            warn_of_no_offload(site.device)
        if self.budget is None:
            offload = Offload(mover) if mover is not None else None
            for name, module in chosen_units(site.model, self.checkpoints).items():
                patch_forward(module, Replay(name, module, site.device, offload=offload, fits_a_graph=offload is None))
        return {}

    def rehearse(self, rehearsal: Rehearsal) -> None:
        if self.budget is None:
            return
        require_countable(rehearsal.model, rehearsal.device)
        planner = Planner(rehearsal, self.checkpoints, mover=mover_for(rehearsal.device) if self.offload else None)
        with rehearsal.leaving_no_trace():
            settled = plan_for(self.budget, planner)
        planner.keep(settled.profile, settled.solution)
        rehearsal.optimizer.memory_plan = settled.plan
        if rehearsal.comm.rank == 0:
            log.say(settled.plan)


def _refuse_one_piece(site: Site) -> None:
    """Refuse a budget where the model runs as one piece: it is kept to by watching modules run."""
    compiling = next((part for part in site.parts if isinstance(part, Compile)), None)
    if compiling is not None and compiling.scope == "model":
        raise ConfigError(
            'recompute_configs["budget"] is kept to by watching modules run; compile_configs["scope"] "model" makes one piece of '
            'them. Write "scope": "blocks", or name modules in "checkpoints".'
        )
    if compiled_by(site.model) == "user":
        raise ConfigError(
            'recompute_configs["budget"] is kept to by watching modules run; torch.compile(model) makes one piece of them. '
            'Write strategy.compile = True in its place, which compiles block by block; or name modules in "checkpoints".'
        )
