"""Muon: matrices move by orthogonalised momentum, the rest by AdamW (K. Jordan 2024; Liu et al. 2025, arXiv 2502.16982)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from ..config.kinds import boolean, choice, integer, key, names, number, numbers
from ..engine.setup.optimizer_swap import named_groups, require_inner, require_no_state, take_over
from ..engine.slots import Part, Risk, Site, Slot
from ..errors import warn_user
from ..optim import Muon as MuonOptimizer
from ..optim.matrix_rule import DEFAULT_EXCLUDE
from ..optim.muon import SCALES, TYPES
from ..optim.orthogonal import COEFFICIENTS


@dataclass(frozen=True, kw_only=True)
class Muon(Part):
    """Orthogonalise the momentum of matrices, shared out between the ranks; AdamW keeps all other tensors.

    Examples:
        >>> strategy = fleet.DistributedStrategy(muon=X.strategies.Muon(muon_weight_decay=0.05))
        >>> strategy.muon_configs["ns_steps"]
        5
    """

    name: ClassVar[str] = "muon"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    inner: ClassVar[tuple[type[Optimizer], ...]] = (torch.optim.AdamW,)
    planning_note: ClassVar[str] = "It is another optimizer, for batches beyond what the noise scale bears."
    why: ClassVar[str] = "Muon orthogonalises momentum that it keeps itself."

    momentum: float = key(0.95, number(0.0, below=1.0), "momentum of the matrices")
    nesterov: bool = key(True, boolean(), "orthogonalise where the momentum will be after one more such gradient")
    ns_steps: int = key(5, integer(1, 99), "steps of the Newton-Schulz iteration")
    muon_weight_decay: float = key(0.1, number(0.0), "decoupled weight decay of the matrices")
    # Four words carry a meaning beyond the name: each is a kind of tensor, whatever it is called.
    exclude: list[str] = key(
        list(DEFAULT_EXCLUDE),
        names("embedding", "head"),
        'what AdamW keeps: "embedding", "head", "norm", "bias" mean kinds of tensors, others are parts of names',
    )
    adjust_lr_fn: str = key("match_rms_adamw", choice(*SCALES), "how a matrix's shape scales the learning rate")
    ns_coefficients: list[float] = key(list(COEFFICIENTS), numbers(number(), count=3), "coefficients of the iteration")
    ns_dtype: str = key("bfloat16", choice(*TYPES), "type in which the iteration runs, and in which its results travel")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.UPDATE, Slot.MOMENTUM})

    def check(self, site: Site) -> None:
        write = "torch.optim.AdamW(model.parameters(), lr=...), which keeps what is no matrix"
        require_inner(self, site.optimizer, write=write)
        require_no_state(self, site, why="AdamW's moments are no momentum of Muon: the numbers differ.")
        self._optimizer(site)

    def build(self, site: Site) -> Mapping[Slot, Any]:
        update = self._optimizer(site)
        without_decay = _without_decay(site.optimizer)
        own = [group for group in without_decay if "muon_weight_decay" not in group]
        take_over(site.optimizer, update, self._settings())
        for group in own:
            group["muon_weight_decay"] = 0.0
        if site.comm.rank == 0:
            self._warn(update)
        if not any(Slot.AVERAGE in part.claims() for part in site.parts):
            # Ranks that train alone have different gradients, and each needs its own orthogonalised. All others have equal ones:
            # they make or skip the same updates, so that every rank is in each step.
            update.share_over(site.comm)
        return {Slot.UPDATE: update}

    def _warn(self, update: MuonOptimizer) -> None:
        if not any(chosen.by_muon for of_group in update.choices for chosen in of_group):
            warn_user(
                "strategy.muon updates no tensor here, which makes it AdamW: all matrices are excluded. Leave strategy.muon out, "
                "or exclude less."
            )
        for doubt in update.doubts():
            warn_user(f"{doubt} optimizer.describe() shows every parameter.")

    def _optimizer(self, site: Site) -> MuonOptimizer:
        keys = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
        return MuonOptimizer(
            named_groups(site, keys=(*keys, "use_muon", *self._settings())),
            exclude=self.exclude,
            model=site.model,
            **self._settings(),
        )

    def _settings(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "ns_steps": self.ns_steps,
            "muon_weight_decay": self.muon_weight_decay,
            "adjust_lr_fn": self.adjust_lr_fn,
            "ns_coefficients": tuple(self.ns_coefficients),
            "ns_dtype": self.ns_dtype,
        }

    @classmethod
    def neutral(cls) -> None:
        return None


def _without_decay(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups that the user has set apart without decay: beside others with decay, their matrices have none either."""
    groups = optimizer.param_groups
    return [group for group in groups if not group["weight_decay"]] if any(group["weight_decay"] for group in groups) else []
