"""LARS: one learning rate per layer, for SGD with very large batches (You et al. 2017, arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from ..config.kinds import boolean, key, names, number
from ..engine.setup.optimizer_swap import named_groups, require_inner, require_neutral, require_no_state, take_over, way_to_run
from ..engine.slots import Part, Risk, Site, Slot
from ..errors import ConfigError
from ..optim import Lars as LarsOptimizer
from ..optim.options import refuse_without_kernels
from ..optim.refuse_decay import require_no_decay


@dataclass(frozen=True, kw_only=True)
class Lars(Part):
    """Give each layer a learning rate of its own, for SGD with very large batches.

    Examples:
        >>> strategy = fleet.DistributedStrategy(lars=X.strategies.Lars(lars_coeff=0.02))
        >>> strategy.lars_configs["lars_coeff"]
        0.02
    """

    name: ClassVar[str] = "lars"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    inner: ClassVar[tuple[type[Optimizer], ...]] = (torch.optim.SGD,)
    planning_note: ClassVar[str] = "It is for batches beyond what the noise scale bears."
    why: ClassVar[str] = "LARS scales each layer's step and folds the learning rate into its momentum."

    lars_coeff: float = key(0.001, number(above=0.0), "trust coefficient: how far a layer may move relative to its norm")
    lars_weight_decay: float = key(0.0005, number(0.0), "weight decay inside the trust ratio")
    epsilon: float = key(0.0, number(0.0), "added to the denominator of the trust ratio")
    # Two words carry a meaning beyond the name: "norm" is every norm layer whatever it is called, "bias" every bias.
    # Paddle's spellings of the two, "batch_norm" and ".b_0", are understood as well.
    exclude_from_weight_decay: list[str] = key(
        ["norm", "bias"], names(), 'parts of parameter names without decay; "norm" and "bias" mean norm layers and biases'
    )
    carry_norms: bool = key(False, boolean(), "keep each weight's norm from the last update (GPU kernels)")

    def claims(self) -> frozenset[Slot]:
        return frozenset({Slot.UPDATE, Slot.MOMENTUM})

    def check(self, site: Site) -> None:
        write = "torch.optim.SGD(model.parameters(), lr=..., momentum=0.9)"
        if type(site.optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            write = f"strategy.lamb = True, the same idea for Adam, in place of strategy.lars; or {write}"
        require_inner(self, site.optimizer, write=write)
        require_neutral(self, site.optimizer)
        if not all(group["momentum"] for group in site.optimizer.param_groups):
            raise ConfigError("strategy.lars needs momentum, and the SGD given has momentum 0 in a group. Write momentum=0.9.")
        require_no_decay(self, site, key="lars_weight_decay", excluded=self.exclude_from_weight_decay)
        require_no_state(self, site, why="SGD's momentum holds no learning rate, that of LARS does: the numbers differ.")
        if self.carry_norms:
            refuse_without_kernels([site.device], carry_norms=True, **way_to_run(site.optimizer))
        self._optimizer(site, carry_norms=False)  # the parameters may not be on their device yet

    def build(self, site: Site) -> Mapping[Slot, Any]:
        update = self._optimizer(site, carry_norms=self.carry_norms)
        take_over(site.optimizer, update, self._settings())
        return {Slot.UPDATE: update}

    def _optimizer(self, site: Site, *, carry_norms: bool) -> LarsOptimizer:
        return LarsOptimizer(
            named_groups(site, keys=("lr", "momentum", "maximize", "decay", "adapt", *self._settings())),
            lr=site.optimizer.defaults["lr"],
            exclude_from_weight_decay=self.exclude_from_weight_decay,
            model=site.model,
            carry_norms=carry_norms,
            **self._settings(),
            **way_to_run(site.optimizer),
        )

    def _settings(self) -> dict[str, Any]:
        return {"lars_coeff": self.lars_coeff, "lars_weight_decay": self.lars_weight_decay, "epsilon": self.epsilon}

    @classmethod
    def neutral(cls) -> None:
        return None
