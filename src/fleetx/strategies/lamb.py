"""LAMB: one trust ratio per layer, for Adam with very large batches (You et al. 2020, arXiv 1904.00962)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from ..config.kinds import boolean, key, names, number
from ..engine.setup.optimizer_swap import named_groups, require_inner, require_neutral, require_no_state, take_over, way_to_run
from ..engine.slots import Part, Risk, Site, Slot
from ..errors import warn_user
from ..optim import Lamb as LambOptimizer
from ..optim.refuse_decay import require_no_decay


@dataclass(frozen=True, kw_only=True)
class Lamb(Part):
    """Give each layer a trust ratio of its own, for Adam with very large batches.

    Examples:
        >>> strategy = fleet.DistributedStrategy(lamb=X.strategies.Lamb(always_adapt=True))
        >>> strategy.lamb_configs["lamb_weight_decay"]
        0.01
    """

    name: ClassVar[str] = "lamb"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    inner: ClassVar[tuple[type[Optimizer], ...]] = (torch.optim.Adam, torch.optim.AdamW)
    planning_note: ClassVar[str] = "It is for batches beyond what the noise scale bears."
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

    def check(self, site: Site) -> None:
        write = "torch.optim.Adam(model.parameters(), lr=...)"
        if type(site.optimizer) is torch.optim.SGD:
            write = f"strategy.lars = True, the same idea for SGD, in place of strategy.lamb; or {write}"
        require_inner(self, site.optimizer, write=write)
        require_neutral(self, site.optimizer)
        require_no_decay(self, site, key="lamb_weight_decay", excluded=self.exclude_from_weight_decay)
        # Adam's moments mean the same here. But Adam keeps no float32 copy of 16-bit parameters, and its step sizes were others:
        # a change of the rule in mid-run should be asked for explicitly.
        require_no_state(self, site, why="A run begun by Adam is not gone on with by another rule unasked.")
        self._optimizer(site)

    def build(self, site: Site) -> Mapping[Slot, Any]:
        update = self._optimizer(site)
        take_over(site.optimizer, update, self._settings())
        if site.comm.rank == 0 and not any(flags.adapt for of_group in update.flags for flags in of_group):
            warn_user(
                "strategy.lamb adapts no tensor here, which makes it Adam: tensors without weight decay are not adapted. "
                'Set a decay, or lamb_configs = {"always_adapt": True}.',
            )
        return {Slot.UPDATE: update}

    def _optimizer(self, site: Site) -> LambOptimizer:
        return LambOptimizer(
            named_groups(site, keys=("lr", "betas", "eps", "maximize", "decay", "adapt", *self._settings())),
            exclude_from_weight_decay=self.exclude_from_weight_decay,
            model=site.model,
            **self._settings(),
            **way_to_run(site.optimizer),
        )

    def _settings(self) -> dict[str, Any]:
        return {"lamb_weight_decay": self.lamb_weight_decay, "always_adapt": self.always_adapt}

    @classmethod
    def neutral(cls) -> None:
        return None
