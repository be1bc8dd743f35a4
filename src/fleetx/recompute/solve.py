"""Which units to compute again so that a step fits into a budget, at the least extra time. Pure: numbers in, a plan out.

Dynamic programming along the row of elements (profile.py): a partial plan is all that was decided so far, and is worse than
another if it keeps more bytes and costs more time, unless a later element could tell the two apart.

A unit that is given just what the unit before it returned can also join that one in a segment: it does not keep its input, which
comes back when the units before it in the segment are run once more. That costs time twice, and is for budgets that nothing else
keeps to. A unit may also park inputs in host memory. They come back early if a later unit is computed again: a partial plan says
of each such unit whether it is the last.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from .profile import Element, Kept, Profile, Way, brought_by, in_use, peak_bytes

MOST_STATES = 6000
"""Partial plans compared at one element. Beyond, of those of about equal size only the fastest stay: the plan found still keeps
to the budget, and may be a little slower than the best one."""

FEW_STATES = 100
"""Up to so many are compared in all respects; beyond, bytes that count in forward decide nothing, and those that come back with a
segment and from the host are taken together."""

ANY_WAY = {"segments": True, "parks": True}
"""For budgets that need all there is."""


@dataclass(frozen=True, slots=True)
class Solution:
    again: frozenset[int]
    """Units that are computed again."""
    seconds: float
    peak_bytes: int
    joins: frozenset[int] = frozenset()
    """Of them those that join the unit before them in a segment."""
    parks: frozenset[int] = frozenset()
    """Of them those that have inputs in host memory."""


def cheapest(profile: Profile, budget: int, *, segments: bool = False, parks: bool = False) -> Solution | None:
    """The plan of least extra time whose peak is within the budget; None if there is none. `segments`: units may be joined;
    `parks`: they may park inputs."""
    if profile.floor > budget:
        return None
    allowed = Allowed(segments, parks and any(element.parks is not None for element in profile.elements))
    fronts: dict[Key, list[State]] = {Key(): [State(Kept(), 0, 0, 0.0, None, None)]}
    for step in _steps(profile):
        grown: dict[Key, list[State]] = {}
        for key, states in fronts.items():
            for chosen, way in step.ways(key, allowed):
                own = profile.own(way, key.held | step.always_held)
                reached = [state for old in states if (state := step.reached(old, own, way, chosen, budget)) is not None]
                for following in step.next_keys(key, way, chosen, allowed):
                    grown.setdefault(following, []).extend(
                        state.settled() if following.none_later else state for state in reached
                    )
        fronts = thinned({key: not_dominated(states) for key, states in grown.items() if states})
    ends = [state for states in fronts.values() for state in states]
    if not ends:
        return None
    best = min(ends, key=lambda state: (state.seconds, state.kept))
    choices = list(best.choices())
    again = frozenset(choice.unit for choice in choices if choice.again)
    joins = frozenset(choice.unit for choice in choices if choice.joins)
    parked = frozenset(choice.unit for choice in choices if choice.parks)
    return Solution(again, best.seconds, peak_bytes(profile, again, joins, parked), joins, parked)


def cheapest_that_fits(profile: Profile, budget: int) -> Solution | None:
    """By computing again alone if that is possible; else by host memory or segments, whichever takes less time; else by both."""
    found = cheapest(profile, budget)
    if found is not None:
        return found
    either = [cheapest(profile, budget, parks=True), cheapest(profile, budget, segments=True)]
    fitting = [solution for solution in either if solution is not None]
    return min(fitting, key=lambda solution: solution.seconds) if fitting else cheapest(profile, budget, **ANY_WAY)


def least_peak(profile: Profile) -> Solution:
    """The cheapest plan of the least peak that there is."""
    found = cheapest(profile, smallest_budget(profile, **ANY_WAY), **ANY_WAY)
    assert found is not None
    return found


def smallest_budget(profile: Profile, *, segments: bool = False, parks: bool = False) -> int:
    """The least peak that any plan has."""
    everything = {e.unit for e in profile.elements if e.again is not None and e.unit is not None}
    low, high = profile.floor - 1, peak_bytes(profile, everything)  # low: too little; high: enough
    while high - low > 1:
        middle = (low + high) // 2
        found = cheapest(profile, middle, segments=segments, parks=parks)
        low, high = (middle, high) if found is None else (low, found.peak_bytes)
    return high


# --- the walk -------------------------------------------------------------------------------------------------------


class Allowed(NamedTuple):
    segments: bool
    parks: bool


class Choice(NamedTuple):
    unit: int
    again: bool
    joins: bool = False
    parks: bool = False


class Key(NamedTuple):
    """All of a partial plan that later elements can notice, beside the bytes it keeps."""

    held: frozenset[int] = frozenset()
    """Of storages that one plan keeps and another does not, and that a later element may keep too: those kept."""
    chosen: frozenset[Choice] = frozenset()
    """Of units that are called again later."""
    ends_again: bool = False
    """The last unit is computed again, and the next one may join it."""
    none_later: bool = False
    """No later unit is computed again, so nothing that is parked comes back before its own backward."""


@dataclass(frozen=True, slots=True)
class State:
    """A plan for the elements so far."""

    kept: Kept
    brought: int
    coming: int
    """Bytes of what the last unit that parks has parked."""
    seconds: float
    chosen: Choice | None
    before: State | None

    def beats(self, other: State) -> bool:
        return (
            self.kept.all <= other.kept.all
            and self.seconds <= other.seconds
            and self.brought <= other.brought
            and self.coming <= other.coming
            and self.kept.in_forward <= other.kept.in_forward
            and self.kept.at_loss <= other.kept.at_loss
        )

    def settled(self) -> State:
        return replace(self, coming=0)

    def choices(self) -> Iterator[Choice]:
        state: State | None = self
        while state is not None:
            if state.chosen is not None:
                yield state.chosen
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
    joined_later: bool
    """The next unit may join this one."""
    is_last: bool

    def ways(self, key: Key, allowed: Allowed) -> list[tuple[Choice | None, Way]]:
        unit, element = self.element.unit, self.element
        if unit is None or element.again is None:
            return [(None, element.stored)]
        found = [(Choice(unit, False), element.stored)]
        if not key.none_later:
            found.append((Choice(unit, True), element.again))
            if allowed.segments and element.joins is not None and key.ends_again:
                found.append((Choice(unit, True, joins=True), element.joins))
            if allowed.parks and element.parks is not None:
                found.append((Choice(unit, True, parks=True), element.parks))
        decided = next((choice for choice in key.chosen if choice.unit == unit), None)
        return [(choice, way) for choice, way in found if decided is None or _are_alike(choice, decided)]

    def reached(self, state: State, own: Kept, way: Way, chosen: Choice | None, budget: int) -> State | None:
        """Where the element is treated so; None where that is over the budget."""
        brought = brought_by(state.brought, self.element, way)
        if max(in_use(state.kept, own, brought + state.coming, way, is_last=self.is_last)) > budget:
            return None
        return State(state.kept.and_(own), brought, way.parked or state.coming, state.seconds + way.seconds, chosen, state)

    def next_keys(self, key: Key, way: Way, chosen: Choice | None, allowed: Allowed) -> list[Key]:
        others = frozenset(c for c in key.chosen if chosen is None or c.unit != chosen.unit)
        remembered = others | {chosen} if chosen is not None and self.called_later else others
        ends_again = key.ends_again if chosen is None else chosen.again
        held = (key.held | way.kept) & self.contested_later
        found = Key(held, remembered, ends_again and self.joined_later, key.none_later)
        may_be_last = allowed.parks and chosen is not None and chosen.again and not self.called_later
        return [found, found._replace(ends_again=False, none_later=True)] if may_be_last else [found]


def _are_alike(one: Choice, other: Choice) -> bool:
    """Every call of a unit is treated so; only units that are called once are joined."""
    return one.again == other.again and one.parks == other.parks


def _steps(profile: Profile) -> Iterator[Walk]:
    last_mention: dict[int, int] = {}
    last_call: dict[int, int] = {}
    for i, element in enumerate(profile.elements):
        for storage in _mentions(element):
            last_mention[storage] = i
        if element.unit is not None:
            last_call[element.unit] = i
    joined_later = _joined_later(profile.elements)
    always: frozenset[int] = frozenset()
    mentioned: set[int] = set()
    for i, element in enumerate(profile.elements):
        before = always
        always |= frozenset.intersection(*(way.kept for way in element.ways()))
        mentioned |= _mentions(element)
        mentioned = {s for s in mentioned if last_mention[s] > i and s not in always}
        called_later = element.unit is not None and last_call[element.unit] > i
        yield Walk(element, before, frozenset(mentioned), called_later, joined_later[i], i == len(profile.elements) - 1)


def _mentions(element: Element) -> frozenset[int]:
    return frozenset().union(*(way.kept for way in element.ways()))


def _joined_later(elements: tuple[Element, ...]) -> list[bool]:
    """Of each element, whether the next unit may join the last one so far."""
    found = [False] * len(elements)
    for i in range(len(elements) - 2, -1, -1):
        following = elements[i + 1]
        found[i] = found[i + 1] if following.unit is None else following.joins is not None
    return found


# --- few states -----------------------------------------------------------------------------------------------------


def not_dominated(states: list[State]) -> list[State]:
    """Those that no other beats in bytes kept, bytes that come back and time, by size."""
    states.sort(key=lambda state: (state.kept, _back(state), state.seconds))
    if len(states) <= FEW_STATES:
        return [state for i, state in enumerate(states) if not any(other.beats(state) for other in states[:i])]
    front: list[State] = []
    fastest: list[State] = []
    """Of the front: by bytes that come back, ever faster."""
    for state in states:
        place = bisect.bisect_right(fastest, _back(state), key=_back)
        if place and fastest[place - 1].seconds <= state.seconds:
            continue
        front.append(state)
        end = place
        while end < len(fastest) and fastest[end].seconds >= state.seconds:
            end += 1
        fastest[place:end] = [state]
    return front


def _back(state: State) -> int:
    return state.brought + state.coming


def thinned(fronts: dict[Key, list[State]]) -> dict[Key, list[State]]:
    """At most about MOST_STATES of them; the smallest of each front stays, or what can be kept might be missed."""
    if sum(map(len, fronts.values())) <= MOST_STATES:
        return fronts
    smallest = sorted(fronts, key=lambda key: fronts[key][0].kept)[: MOST_STATES // 2]
    return {key: _thin(fronts[key], MOST_STATES // len(smallest)) for key in smallest}


def _thin(front: list[State], most: int) -> list[State]:
    smallest = front[0].kept.all
    grain = (front[-1].kept.all - smallest) // max(1, most - 1) + 1
    slots = {-1: front[0]}
    for state in front[1:]:
        slot = (state.kept.all - smallest) // grain
        if slot not in slots or state.seconds < slots[slot].seconds:
            slots[slot] = state
    return list(slots.values())
