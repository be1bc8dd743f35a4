"""Auto: measure the model and the network, then choose the strategy and say why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config.kinds import choice, integer, key, optional, path, size
from ..engine.slots import Part, Risk, Site, Slot
from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Auto(Part):
    """Measure the model and the network, choose the other parts, and say why.

    It is never built: fleet.distribute(...) puts the chosen strategy in its place (auto/search.py).

    Examples:
        >>> strategy = fleet.DistributedStrategy(auto=X.strategies.Auto(risk="lossy", memory="20GiB"))
        >>> strategy.auto_configs["risk"]
        'lossy'
    """

    name: ClassVar[str] = "auto"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    why: ClassVar[str] = "Auto chooses the parts itself."

    risk: str = key("rounding", choice(*(r.value for r in Risk)), "the riskiest class of part it may choose")
    trials: int = key(3, integer(1), "candidates that are run for some real steps")
    memory: int | None = key(None, optional(size()), "peak memory to stay under; None is what the device has")
    global_batch: int | None = key(
        None, optional(integer(1)), "samples of one update of all ranks; None: what one sample on each rank makes"
    )
    total_steps: int | None = key(
        None, optional(integer(1)), "updates of the run, among which the seconds of compiling are shared out; None: not known"
    )
    plan: str | None = key(None, optional(path(".json")), "file of the plan: used again if it fits, written if not")

    def claims(self) -> frozenset[Slot]:
        return frozenset()

    def check(self, site: Site) -> None:
        raise ConfigError(
            "strategy.auto chooses by running steps, inside fleet.distribute(...) alone. Write model, optimizer = "
            "fleet.distribute(model, optimizer, strategy, sample=batch), with loss_fn=lambda model, batch: ... where the model "
            'has no method loss(batch); a batch is found by auto_configs["global_batch"].'
        )

    def build(self, site: Site) -> Mapping[Slot, Any]:
        return {}

    @classmethod
    def neutral(cls) -> None:
        return None
