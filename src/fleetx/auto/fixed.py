"""Parts that the user set beside `auto`: in all that is tried and in the plan as they are; only the rest is chosen.

What the forecasts know of each:

    amp                its precision is the only one that is measured
    gradient_merge     its micro-batches make up every update
    recompute          passes are those of its units, or of the plan that its budget leads to
    a reducer, localsgd, adaptive_localsgd
                       the only one that is measured, with all its settings. What it would send over other links follows from its
                       kind and main setting alone: two_level, wire_dtype, overlap_steps and later periods are not in that. The
                       memory that overlap_steps takes is in the real updates alone
    lars, lamb         the optimizer's step is timed by them
    clip_norm          a part of every exchange that is measured
    sync_batch_norm    its messages are in the real updates alone. Every candidate has them, so the order among candidates stays
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, final

import torch

from ..engine.overview import described
from ..engine.slots import Part, Slot
from ..errors import ConfigError
from ..strategies import catalogue
from ..strategies.adaptive_localsgd import AdaptiveLocalSGD
from ..strategies.amp import Amp
from ..strategies.auto import Auto
from ..strategies.dgc import DGC
from ..strategies.gradient_merge import GradientMerge
from ..strategies.localsgd import LocalSGD
from ..strategies.powersgd import PowerSGD
from ..strategies.recompute import Recompute
from ..strategy import DistributedStrategy
from .cost import COSTS, Reducer

P = TypeVar("P", bound=Part)


@final
@dataclass(frozen=True, slots=True)
class Fixed:
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Self:
        """Those of a strategy that are not `auto` itself."""
        return cls(tuple(part for part in parts if not isinstance(part, Auto)))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Of what `settings` gave, as a plan's file has it."""
        return cls.of(DistributedStrategy.from_dict(settings).parts())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def settings(self) -> dict[str, Any]:
        """As a DistributedStrategy takes them."""
        return _settings(self.parts)

    def described(self) -> list[str]:
        return [described(part) for part in self.parts]

    def refusal(self, name: str) -> str | None:
        """Why a part cannot stand beside these; None where it can."""
        wanted = catalogue()[name]().claims()
        for part in self.parts:
            slot = next((slot for slot in Slot if slot in wanted & part.claims()), None)
            if slot is not None:
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
        return None if part is None else reducer_of(part)

    def _one(self, kind: type[P]) -> P | None:
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def compressed(self) -> dict[str, Any]:
        """Which tensors compressors take, where the user has said so: arguments of `gradients_of`."""
        dgc, powersgd = self._one(DGC), self._one(PowerSGD)
        found: dict[str, Any] = {} if dgc is None else {"large_from": dgc.min_numel}
        return found if powersgd is None else found | {"rank": powersgd.rank, "min_compression": powersgd.min_compression}

    # --- while updates are timed ------------------------------------------------------------------------------------------

    def timed(self, settings: Mapping[str, Any], *, recomputes: bool) -> dict[str, Any]:
        """Beside a candidate's own settings, for steps that are only timed. How many micro-steps make an update, and updates a
        period, is as the candidate has it: few of them tell what many take. `recomputes`: else passes are measured unit by unit,
        with nothing computed again."""
        parts = [part for part in self.parts if recomputes or not isinstance(part, Recompute)]
        return {**settings, **_settings(_at_once(part, settings) for part in parts)}


NOTHING = Fixed()


def reducer_of(part: Part) -> Reducer:
    """Its kind and main setting, as the cost functions know them."""
    if part.name not in COSTS:
        raise ConfigError(f"auto cannot plan around `{part.name}`: it cannot predict what that sends. Leave one of the two out.")
    return Reducer(part.name, float(_main_setting(part)))


def _main_setting(part: Part) -> float:
    match part:
        case DGC():
            return part.sparsity[-1]
        case PowerSGD():
            return part.rank
        case LocalSGD():
            return part.k_steps
        case AdaptiveLocalSGD():
            return part.init_k_steps
        case _:
            return 0.0


def _settings(parts: Iterable[Part]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        found[part.name] = True
        if dataclasses.fields(part):
            found[f"{part.name}_configs"] = dataclasses.asdict(part)
    return found


def _at_once(part: Part, settings: Mapping[str, Any]) -> Part:
    """The same without what it leaves out or does otherwise at the start of a training: what is timed is what comes after."""
    configs: Mapping[str, Any] = settings.get(f"{part.name}_configs", {})
    match part:
        case GradientMerge():
            return replace(part, k_steps=configs.get("k_steps", 1))
        case LocalSGD():
            period = configs.get("k_steps", 1)
            return replace(part, k_steps=period, begin_step=1, overlap_steps=min(part.overlap_steps, period - 1))
        case AdaptiveLocalSGD():
            period = configs.get("init_k_steps", 1)
            overlap = min(part.overlap_steps, period - 1)
            return replace(part, init_k_steps=period, max_k_steps=period, begin_step=1, overlap_steps=overlap)
        case PowerSGD():
            return replace(part, begin_step=0)
        case DGC():
            return replace(part, rampup_begin_step=0, rampup_step=1, sparsity=part.sparsity[-1:])
        case Amp() if part.torch_dtype() == torch.float16:
            return replace(part, init_loss_scaling=1.0)  # an update that overflows is skipped, and takes less time
        case _:
            return part
