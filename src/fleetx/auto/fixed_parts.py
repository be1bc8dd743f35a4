"""Keep the parts that the user set beside `auto`: all that is tried has them as they are, and only the rest is chosen.

What the predictions know of each:

    amp                its precision is the only one that is measured
    gradient_merge     its micro-batches make up every update
    recompute          passes are those of its units, or of the plan that its budget leads to
    a part that claims `reduce`
                       the only reducer that is measured, with all its settings. What it sends over other links is what its
                       wire_cost says: two_level, overlap_steps, fragments and later periods are not in that. The memory that
                       overlap_steps takes shows in the real updates alone
    lars, lamb, muon   the optimizer's step is timed with them
    clip_norm          a part of every exchange that is measured
    sync_batch_norm    its messages show in the real updates alone. Every candidate has them, so the order among candidates stays
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, final

from ..engine.setup.strategy_tables import described
from ..engine.slots import Part, Slot
from ..strategies import catalogue
from ..strategies.amp import Amp
from ..strategies.auto import Auto
from ..strategies.gradient_merge import GradientMerge
from ..strategies.recompute import Recompute
from ..strategy import DistributedStrategy
from .cost import Reducer, settings_of

P = TypeVar("P", bound=Part)


@final
@dataclass(frozen=True, slots=True)
class Fixed:
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Self:
        """Take the parts of a strategy that are not `auto` itself."""
        return cls(tuple(part for part in parts if not isinstance(part, Auto)))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Make them of what `settings` gave, as a plan's file has it."""
        return cls.of(DistributedStrategy.from_dict(settings).parts())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a DistributedStrategy that switch these parts on."""
        return settings_of(self.parts)

    def described(self) -> list[str]:
        return [described(part) for part in self.parts]

    def refusal(self, name: str) -> str | None:
        """Say why a part cannot stand beside these; None where it can."""
        wanted = catalogue()[name]().claims()
        for part in self.parts:
            shared = [slot for slot in Slot if slot in wanted & part.claims()]
            if shared:
                # What the two do is said by another slot than `shard`, which each claims for the sake of its weights or momentum.
                slot = next((slot for slot in shared if slot is not Slot.SHARD), Slot.SHARD)
                return f"{part.name}, which you set, claims `{slot.value}`."
        return None

    # --- what is no longer to be chosen -----------------------------------------------------------------------------------

    @property
    def precision(self) -> str | None:
        amp = self._one(Amp)
        return None if amp is None else str(amp.torch_dtype()).removeprefix("torch.")

    @property
    def merge_steps(self) -> int | None:
        merge = self._one(GradientMerge)
        return None if merge is None else merge.k_steps

    @property
    def recompute(self) -> Recompute | None:
        return self._one(Recompute)

    @property
    def reducer(self) -> Reducer | None:
        part = next((part for part in self.parts if Slot.REDUCE in part.claims()), None)
        return None if part is None else Reducer(part)

    def _one(self, kind: type[P]) -> P | None:
        return next((part for part in self.parts if isinstance(part, kind)), None)

    # --- while updates are timed ------------------------------------------------------------------------------------------

    def timed(self, settings: Mapping[str, Any], *, recomputes: bool) -> dict[str, Any]:
        """Merge these parts into a candidate's settings, for steps that are only timed. How many micro-steps make an update, and
        how many updates share an exchange, is as the candidate has it: a few of them show what many take. `recomputes`: False
        where passes are measured unit by unit, with nothing computed again."""
        parts = [part for part in self.parts if recomputes or not isinstance(part, Recompute)]
        return {**settings, **settings_of(_timed(part, settings) for part in parts)}


NOTHING = Fixed()


def _timed(part: Part, settings: Mapping[str, Any]) -> Part:
    """Return a part as it is after the start of a training, with the merging and the period of a candidate's settings."""
    of_candidate = type(part)(**settings.get(f"{part.name}_configs", {}))
    if isinstance(part, GradientMerge) and isinstance(of_candidate, GradientMerge):
        return replace(part, k_steps=of_candidate.k_steps)
    return part.steady(of_candidate.updates_per_exchange())
