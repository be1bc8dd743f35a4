"""What `auto` may choose: a point in precision x micro-batch and merging x reducer; recompute follows from the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from ..engine.slots import Risk
from ..strategy import DistributedStrategy
from .cost import Reducer

DENSE = Reducer()
RISKS = tuple(Risk)
"""From what changes no bit to what changes the algorithm."""
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
FEWER, MORE = 8, 16
"""Times as many rows as the sample has."""
MERGES = (1, 2, 4, 8)
"""Micro-batches of one update, where the update's batch is not asked for and may change."""
REDUCERS = (
    DENSE,
    Reducer("bf16_allreduce"),
    Reducer("powersgd", 4),
    Reducer("dgc", 0.999),
    *(Reducer("localsgd", period) for period in (2, 4, 8, 16)),
)
RISK_OF = {
    "dense": Risk.EXACT,
    "bf16_allreduce": Risk.ROUNDING,
    "fp16_allreduce": Risk.ROUNDING,
    "powersgd": Risk.LOSSY,
    "dgc": Risk.LOSSY,
    "localsgd": Risk.SCHEDULE,
    "adaptive_localsgd": Risk.SCHEDULE,
}


def allows(allowed: str, risk: Risk) -> bool:
    return RISKS.index(risk) <= RISKS.index(Risk(allowed))


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    precision: str = "float32"
    batch: int = 0
    """Rows of one rank in one micro-step; 0 where the sample has none that can be counted."""
    merge_steps: int = 1
    reducer: Reducer = DENSE
    recomputes: bool = False
    recomputed: tuple[str, ...] = ()
    """Modules that are computed again; empty: those that a budget comes to."""
    grows_batch: bool = False
    """Its update takes more samples than the user's own would."""
    kept: tuple[str, ...] = ()
    """Parts that the user has set, by name."""

    @property
    def risk(self) -> Risk:
        """Of what is added to the parts that the user has set."""
        found = [RISK_OF["dense" if self.reducer.kind in self.kept else self.reducer.kind]]
        found += [Risk.ROUNDING] if self.precision != "float32" and "amp" not in self.kept else []
        found += [Risk.SCHEDULE] if self.grows_batch else []
        return max(found, key=RISKS.index)

    @property
    def daring(self) -> tuple[int, int, int, bool]:
        """How far it is from plain training: the least of plans that are as good as each other is taken."""
        grown = self.merge_steps if self.grows_batch else 1
        return RISKS.index(self.risk), grown * self.reducer.period, grown, self.recomputes

    @property
    def name(self) -> str:
        kind, setting = self.reducer.kind, self.reducer.setting
        words = [SHORT[self.precision]]
        words += ["recompute"] if self.recomputes else []
        words += (
            [f"{self.merge_steps} x {self.batch}" if self.batch else f"merge {self.merge_steps}"] if self.merge_steps > 1 else []
        )
        words += [] if kind == "dense" else [f"{kind} {setting:g}" if setting else kind]
        return ", ".join(words)

    def settings(self, memory: int | None = None) -> dict[str, Any]:
        """As a DistributedStrategy takes them; `memory`: what recompute is to keep to."""
        found: dict[str, Any] = {}
        if self.precision != "float32":
            found |= {"amp": True, "amp_configs": {"dtype": self.precision}}
        if self.recomputes:
            which = {"checkpoints": list(self.recomputed)} if self.recomputed else {"budget": memory}
            found |= {"recompute": True, "recompute_configs": which}
        if self.merge_steps > 1:
            found |= {"gradient_merge": True, "gradient_merge_configs": {"k_steps": self.merge_steps}}
        return found | reducer_settings(self.reducer)

    def strategy(self, memory: int | None = None) -> DistributedStrategy:
        return DistributedStrategy(**self.settings(memory))


def reducer_settings(reducer: Reducer) -> dict[str, Any]:
    configs = {
        "dgc": {"sparsity": [reducer.setting]},
        "powersgd": {"rank": int(reducer.setting)},
        "localsgd": {"k_steps": int(reducer.setting)},
        "adaptive_localsgd": {"init_k_steps": int(reducer.setting)},
    }
    if reducer.kind == "dense":
        return {}
    own = {f"{reducer.kind}_configs": configs[reducer.kind]} if reducer.kind in configs else {}
    return {reducer.kind: True, **own}


def at_once(settings: dict[str, Any]) -> dict[str, Any]:
    """The same without the updates that PowerSGD keeps dense at the start: what is timed is to be what comes after them."""
    if not settings.get("powersgd"):
        return settings
    return {**settings, "powersgd_configs": {**settings["powersgd_configs"], "begin_step": 0}}


def batches_of(share: int, *, near: int) -> list[tuple[int, int]]:
    """Micro-batches that make up one rank's share of a global batch without a rest, and how many of them, largest first: those
    that are not too far from what can be measured; the nearest, if all are."""
    low = [steps for steps in range(1, math.isqrt(share) + 1) if share % steps == 0]
    found = [(share // steps, steps) for steps in sorted({*low, *(share // steps for steps in low)})]
    close = [one for one in found if near / FEWER <= one[0] <= MORE * near]
    return close or [min(found, key=lambda one: abs(math.log(one[0] / near)))]


def every(
    precisions: Sequence[str],
    batches: Sequence[tuple[int, int]],
    reducers: Sequence[Reducer],
    *,
    own_batch: bool,
    risk: str,
    kept: tuple[str, ...] = (),
) -> Iterator[Candidate]:
    """All that the risk allows, without recompute. `batches`: micro-batches and merge steps; `own_batch`: the update is as large
    as the user's own only without merging; `kept`: parts that the user has set."""
    grows = own_batch and "gradient_merge" not in kept
    for precision in precisions:
        for batch, steps in batches:
            for reducer in reducers:
                found = Candidate(precision, batch, steps, reducer, grows_batch=grows and steps > 1, kept=kept)
                if allows(risk, found.risk):
                    yield found
