"""Which units to compute again so that a step fits into a budget, at the least extra time. Pure: numbers in, a plan out.

A step is a row of elements, in the order of forward: calls of units, and the glue between them, which is always stored.
Each element keeps storages until its backward: what it saved or, if it is computed again, its inputs. Backward runs through the
row from its end, so when it comes to an element, exactly the elements before it still keep theirs:

    bytes(kept by all before it, and by itself) + what its own backward needs on top  <=  budget      at every element

Storages shared by several elements count once. That is why a plan is not a sum of savings, and why the peak of a plan is not
the sum of what is saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

MOST_STATES = 6000
"""Partial plans compared at one element. Beyond, of those of about equal size only the fastest stay: the plan found still keeps
to the budget, and may be a little slower than the best one."""


@dataclass(frozen=True, slots=True)
class Way:
    """One of the two ways to treat an element."""

    kept: frozenset[int]
    """Storages, by number, from its forward to its backward."""
    forward_extra: int
    """Its forward needs so many bytes beyond what elements before it keep."""
    backward_extra: int
    """Its backward, beyond what they and it keep; being computed again is a part of it."""
    seconds: float = 0.0
    """Of being computed again."""


@dataclass(frozen=True, slots=True)
class Element:
    unit: int | None
    """Which unit this is a call of; None for glue."""
    stored: Way
    again: Way | None = None
    """None where it cannot be computed again: glue."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A step, measured."""

    units: tuple[str, ...]
    elements: tuple[Element, ...]
    sizes: Mapping[int, int]
    """Bytes of each storage."""
    floor: int
    """Bytes that every plan needs at some time: those of the update."""


@dataclass(frozen=True, slots=True)
class Solution:
    again: frozenset[int]
    """Units that are computed again."""
    seconds: float
    peak_bytes: int


def peak_bytes(profile: Profile, again: Iterable[int]) -> int:
    """The largest number of bytes in use at any time of a step, if these units are computed again."""
    chosen = set(again)
    held: set[int] = set()
    kept_bytes, peak = 0, profile.floor
    for element in profile.elements:
        way = element.again if element.again is not None and element.unit in chosen else element.stored
        own = sum(profile.sizes[s] for s in way.kept - held)
        peak = max(peak, kept_bytes + way.forward_extra, kept_bytes + own + way.backward_extra)
        held |= way.kept
        kept_bytes += own
    return peak


def seconds_added(profile: Profile, again: Iterable[int]) -> float:
    chosen = set(again)
    return sum(e.again.seconds for e in profile.elements if e.again is not None and e.unit in chosen)


def cheapest(profile: Profile, budget: int) -> Solution | None:
    """The plan of least extra time whose peak is within the budget; None if there is none."""
    if profile.floor > budget:
        return None
    fronts: dict[Key, list[State]] = {Key(frozenset(), frozenset()): [State(0, 0.0, None, None)]}
    for step in _steps(profile):
        grown: dict[Key, list[State]] = {}
        for key, states in fronts.items():
            for chosen, way in step.ways(key):
                own = sum(profile.sizes[s] for s in way.kept - key.held - step.always_held)
                room = budget - max(way.forward_extra, own + way.backward_extra)
                following = step.next_key(key, way, chosen)
                reached = grown.setdefault(following, [])
                reached += [State(s.kept_bytes + own, s.seconds + way.seconds, chosen, s) for s in states if s.kept_bytes <= room]
        fronts = thinned({key: not_dominated(states) for key, states in grown.items() if states})
    ends = [state for states in fronts.values() for state in states]
    if not ends:
        return None
    best = min(ends, key=lambda state: (state.seconds, state.kept_bytes))
    again = frozenset(best.units_again())
    return Solution(again, best.seconds, peak_bytes(profile, again))


def smallest_budget(profile: Profile) -> int:
    """The least peak that any plan has."""
    everything = {e.unit for e in profile.elements if e.again is not None and e.unit is not None}
    low, high = profile.floor - 1, peak_bytes(profile, everything)  # low: too little; high: enough
    while high - low > 1:
        middle = (low + high) // 2
        found = cheapest(profile, middle)
        low, high = (middle, high) if found is None else (low, found.peak_bytes)
    return high


# --- the walk -------------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """All of a partial plan that later elements can notice, beside the bytes it keeps."""

    held: frozenset[int]
    """Of storages that one plan keeps and another does not, and that a later element may keep too: those kept."""
    chosen: frozenset[tuple[int, bool]]
    """Of units that are called again later: whether they are computed again."""


@dataclass(frozen=True, slots=True)
class State:
    """A plan for the elements so far."""

    kept_bytes: int
    seconds: float
    chosen: tuple[int, bool] | None
    before: State | None

    def units_again(self) -> Iterator[int]:
        state: State | None = self
        while state is not None:
            if state.chosen is not None and state.chosen[1]:
                yield state.chosen[0]
            state = state.before


@final
@dataclass(frozen=True, slots=True)
class Walk:
    """One element, and what its neighbours make of it."""

    element: Element
    always_held: frozenset[int]
    """Storages that every plan keeps by now."""
    contested_later: frozenset[int]
    """Storages that some plans keep by the end of this element, and later elements may keep."""
    called_later: bool

    def ways(self, key: Key) -> list[tuple[tuple[int, bool] | None, Way]]:
        element = self.element
        if element.unit is None or element.again is None:
            return [(None, element.stored)]
        both = [((element.unit, False), element.stored), ((element.unit, True), element.again)]
        decided = dict(key.chosen).get(element.unit)
        return [(chosen, way) for chosen, way in both if decided is None or chosen[1] == decided]

    def next_key(self, key: Key, way: Way, chosen: tuple[int, bool] | None) -> Key:
        others = frozenset(c for c in key.chosen if chosen is None or c[0] != chosen[0])
        remembered = others | {chosen} if chosen is not None and self.called_later else others
        return Key((key.held | way.kept) & self.contested_later, remembered)


def _steps(profile: Profile) -> Iterator[Walk]:
    last_mention: dict[int, int] = {}
    last_call: dict[int, int] = {}
    for i, element in enumerate(profile.elements):
        for storage in _mentions(element):
            last_mention[storage] = i
        if element.unit is not None:
            last_call[element.unit] = i
    always: frozenset[int] = frozenset()
    mentioned: set[int] = set()
    for i, element in enumerate(profile.elements):
        before = always
        always |= element.stored.kept if element.again is None else element.stored.kept & element.again.kept
        mentioned |= _mentions(element)
        mentioned = {s for s in mentioned if last_mention[s] > i and s not in always}
        yield Walk(element, before, frozenset(mentioned), element.unit is not None and last_call[element.unit] > i)


def _mentions(element: Element) -> frozenset[int]:
    return element.stored.kept | (element.again.kept if element.again is not None else frozenset())


def not_dominated(states: list[State]) -> list[State]:
    """Those that no other beats in both bytes and time, by size."""
    states.sort(key=lambda state: (state.kept_bytes, state.seconds))
    front: list[State] = []
    for state in states:
        if not front or state.seconds < front[-1].seconds:
            front.append(state)
    return front


def thinned(fronts: dict[Key, list[State]]) -> dict[Key, list[State]]:
    """At most about MOST_STATES of them; the smallest of each front stays, or what can be kept might be missed."""
    if sum(map(len, fronts.values())) <= MOST_STATES:
        return fronts
    smallest = sorted(fronts, key=lambda key: fronts[key][0].kept_bytes)[: MOST_STATES // 2]
    return {key: _thin(fronts[key], MOST_STATES // len(smallest)) for key in smallest}


def _thin(front: list[State], most: int) -> list[State]:
    smallest = front[0].kept_bytes
    grain = (front[-1].kept_bytes - smallest) // max(1, most - 1) + 1
    slots = {-1: front[0]}
    for state in front[1:]:  # ever faster: the last one of a slot is its fastest
        slots[(state.kept_bytes - smallest) // grain] = state
    return list(slots.values())
