"""The user's own recompute, set beside `auto`: which plan it leads to, by the profile of a step without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from ..recompute.host_memory import Mover, mover_for
from ..recompute.profile import Profile, peak_bytes
from ..recompute.solve import Solution
from ..recompute.units import chosen_units
from .subject import Subject


def computed_again(profile: Profile, *, parks: bool) -> Solution:
    """Every unit; `parks`: with its inputs in host memory, where it has some that leave the device."""
    elements = [element for element in profile.elements if element.unit is not None and element.again is not None]
    again = frozenset(element.unit for element in elements if element.unit is not None)
    parked = frozenset(element.unit for element in elements if element.unit is not None and parks and element.parks is not None)
    seconds = sum(element.way(again=True, joins=False, parks=parks).seconds for element in elements)
    return Solution(again, seconds, peak_bytes(profile, again, parks=parked), parks=parked)


@final
class OwnRecompute:
    def __init__(self, subject: Subject) -> None:
        own = subject.fixed.recompute
        assert own is not None
        self.is_settled = own.budget is None
        """By names: nothing is left to choose. By a budget the cheapest plan within it is taken, as `auto` itself would."""
        self.wanted: Sequence[str] = list(chosen_units(subject.model, own.checkpoints)) if self.is_settled else own.checkpoints
        self.mover: Mover | None = mover_for(subject.device) if own.offload else None

    def plan(self, profile: Profile) -> Solution:
        return computed_again(profile, parks=self.mover is not None)
