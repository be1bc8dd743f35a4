"""Enumerate what `auto` may choose: precision x compiled or not x micro-batch and merging x reducer; recompute follows from the
memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from ..engine.slots import Part, PlanContext, Risk
from ..strategies import catalogue
from ..strategy import DistributedStrategy
from .cost import Reducer

DENSE = Reducer()
RISKS = tuple(Risk)
"""Classes of risk, from what changes no bit to what changes the algorithm."""
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
FEWER, MORE = 8, 16
"""A micro-batch has at least one in `FEWER` of the sample's rows, and at most `MORE` times as many."""
MERGES = (1, 2, 4, 8)
"""Micro-batches of one update, where the update's batch is not asked for and may change."""


def allows(allowed: str, risk: Risk) -> bool:
    """Return whether a class of risk is at most the one allowed."""
    return RISKS.index(risk) <= RISKS.index(Risk(allowed))


def parts_in_order() -> list[type[Part]]:
    """List the catalogue: the least risky parts first, of these the ones that claim fewest slots."""
    return sorted(catalogue().values(), key=lambda part: (RISKS.index(part.risk_class), len(part().claims()), part.name))


def offered(context: PlanContext) -> list[Reducer]:
    """List the ways to reduce: plain training, then all that parts offer."""
    return [DENSE, *(Reducer(settings) for part in parts_in_order() for settings in part.candidates(context))]


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
    """Whether its update takes more samples than the user's own would."""
    kept: tuple[str, ...] = ()
    """Names of the parts that the user has set."""
    compiles: bool = False
    """Whether blocks are compiled, beyond what the user has set."""

    @property
    def risk(self) -> Risk:
        """Class of risk of what is added to the parts that the user has set."""
        found = [Risk.EXACT if self.reducer.kind in self.kept else self.reducer.risk]
        found += [Risk.ROUNDING] if self.precision != "float32" and "amp" not in self.kept else []
        found += [Risk.ROUNDING] if self.compiles else []
        found += [Risk.SCHEDULE] if self.grows_batch else []
        return max(found, key=RISKS.index)

    @property
    def risk_order(self) -> tuple[int, int, int, bool, bool]:
        """Sort key, plain training first: of plans that are equally fast the first is taken."""
        grown = self.merge_steps if self.grows_batch else 1
        return RISKS.index(self.risk), grown * self.reducer.period, grown, self.compiles, self.recomputes

    @property
    def name(self) -> str:
        words = [SHORT[self.precision]]
        words += ["compile"] if self.compiles else []
        words += ["recompute"] if self.recomputes else []
        words += (
            [f"{self.merge_steps} x {self.batch}" if self.batch else f"merge {self.merge_steps}"] if self.merge_steps > 1 else []
        )
        words += [] if self.reducer == DENSE else [self.reducer.label]
        return ", ".join(words)

    def settings(self, memory: int | None = None) -> dict[str, Any]:
        """Settings of a DistributedStrategy; `memory`: the budget of recompute."""
        found: dict[str, Any] = {}
        if self.precision != "float32":
            found |= {"amp": True, "amp_configs": {"dtype": self.precision}}
        if self.compiles:
            found["compile"] = True
        if self.recomputes:
            which = {"checkpoints": list(self.recomputed)} if self.recomputed else {"budget": memory}
            found |= {"recompute": True, "recompute_configs": which}
        if self.merge_steps > 1:
            found |= {"gradient_merge": True, "gradient_merge_configs": {"k_steps": self.merge_steps}}
        return found | self.reducer.settings()

    def strategy(self, memory: int | None = None) -> DistributedStrategy:
        return DistributedStrategy(**self.settings(memory))


def batches_of(share: int, *, near: int) -> list[tuple[int, int]]:
    """Split one rank's share of a global batch into equal micro-batches: their rows and number, largest first. Sizes far from
    `near`, which can be measured, are left out; if all are far, the nearest is taken."""
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
    compiled: Collection[str] = (),
) -> Iterator[Candidate]:
    """Yield all that the risk allows, without recompute. `batches`: micro-batches and merge steps; `own_batch`: the update is as
    large as the user's own only without merging; `kept`: names of the parts that the user has set; `compiled`: precisions that
    were measured compiled as well."""
    grows = own_batch and "gradient_merge" not in kept
    kinds = [(precision, False) for precision in precisions] + [(precision, True) for precision in compiled]
    for precision, compiles in kinds:
        for batch, steps in batches:
            for reducer in reducers:
                grown = grows and steps > 1
                found = Candidate(precision, batch, steps, reducer, grows_batch=grown, kept=kept, compiles=compiles)
                if allows(risk, found.risk):
                    yield found
