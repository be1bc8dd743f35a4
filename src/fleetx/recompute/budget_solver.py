"""Choose units to compute again so that a step fits into a budget, at the least extra time. Pure: numbers in, a plan out.

Dynamic programming along the row of elements (profile.py): a partial plan holds all decisions so far, and is dropped if another
keeps no more bytes and costs no more time, unless a later element could distinguish the two.

A unit whose input is just what the unit before it returned can join that one in a segment: it does not keep its input, which
comes back when the units before it in the segment run once more. That costs time twice, and is for budgets that nothing else
keeps to. A unit may also keep inputs in host memory. They are fetched early if a later unit is computed again: a partial plan
records for each such unit whether it is the last.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from .profile import Element, Kept, Profile, Way, brought_by, in_use, peak_bytes

MOST_STATES = 6000
"""Partial plans compared at one element. Beyond that only the fastest of about equal size are kept: the plan still keeps to the
budget, and may be a little slower than the best one."""

FEW_STATES = 100
"""Up to so many partial plans are compared in all respects. Beyond that, bytes that count in forward are ignored, and bytes that
come back with a segment and from the host are added up."""

ANY_WAY = {"segments": True, "offload": True}
"""Arguments that allow every way, for budgets that need them."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan: how each unit is treated."""

    again: frozenset[int]
    """Units that are computed again."""
    seconds: float
    """Time that it adds to a step."""
    peak_bytes: int
    """Predicted peak of bytes in use."""
    joins: frozenset[int] = frozenset()
    """Units computed again that join the unit before them in a segment."""
    offloads: frozenset[int] = frozenset()
    """Units computed again from inputs in host memory."""


def cheapest(profile: Profile, budget: int, *, segments: bool = False, offload: bool = False) -> Solution | None:
    """Return the plan of least extra time whose peak is within the budget; None if there is none. `segments`: units may join;
    `offload`: inputs may be in host memory."""
    if profile.floor > budget:
        return None
    allowed = Allowed(segments, offload and any(element.offloads is not None for element in profile.elements))
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
    offloaded = frozenset(choice.unit for choice in choices if choice.offloads)
    return Solution(again, best.seconds, peak_bytes(profile, again, joins, offloaded), joins, offloaded)


def cheapest_that_fits(profile: Profile, budget: int) -> Solution | None:
    """Return the cheapest plan without host memory and segments if one fits; else with the faster of the two; else with both."""
    plain = cheapest(profile, budget)
    if plain is not None:
        return plain
    either = [cheapest(profile, budget, offload=True), cheapest(profile, budget, segments=True)]
    fitting = [solution for solution in either if solution is not None]
    return min(fitting, key=lambda solution: solution.seconds) if fitting else cheapest(profile, budget, **ANY_WAY)


def least_peak(profile: Profile) -> Solution:
    """Return the cheapest plan of the least possible peak."""
    solution = cheapest(profile, smallest_budget(profile, **ANY_WAY), **ANY_WAY)
    assert solution is not None
    return solution


def smallest_budget(profile: Profile, *, segments: bool = False, offload: bool = False) -> int:
    """Return the least peak that any plan has."""
    all_units = {e.unit for e in profile.elements if e.again is not None and e.unit is not None}
    low, high = profile.floor - 1, peak_bytes(profile, all_units)  # low: too little; high: enough
    while high - low > 1:
        middle = (low + high) // 2
        solution = cheapest(profile, middle, segments=segments, offload=offload)
        low, high = (middle, high) if solution is None else (low, solution.peak_bytes)
    return high


# --- the walk -------------------------------------------------------------------------------------------------------


class Allowed(NamedTuple):
    """The ways that a plan may use beside computing again."""

    segments: bool
    offload: bool


class Choice(NamedTuple):
    """How a partial plan treats one unit."""

    unit: int
    again: bool
    joins: bool = False
    offloads: bool = False


class Key(NamedTuple):
    """What later elements need to know of a partial plan, beside the bytes that it keeps."""

    held: frozenset[int] = frozenset()
    """Storages that it keeps, among those that some plans keep and others do not, and that a later element may keep."""
    chosen: frozenset[Choice] = frozenset()
    """Choices for units that are called once more later."""
    ends_again: bool = False
    """Whether the last unit is computed again and the next one may join it."""
    none_later: bool = False
    """Whether no later unit is computed again, so that offloaded inputs are fetched only by their own unit."""


@dataclass(frozen=True, slots=True)
class State:
    """A partial plan: the elements so far."""

    kept: Kept
    brought: int
    coming: int
    """Bytes that the last unit with inputs in host memory will fetch."""
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
    """One element, and what the walk needs to know of the elements before and after it."""

    element: Element
    always_held: frozenset[int]
    """Storages that every plan keeps before this element."""
    contested_later: frozenset[int]
    """Storages that some plans keep by the end of this element, and that later elements may keep."""
    called_later: bool
    """Whether the unit is called once more later."""
    joined_later: bool
    """Whether the next unit may join the last one so far."""
    is_last: bool

    def ways(self, key: Key, allowed: Allowed) -> list[tuple[Choice | None, Way]]:
        unit, element = self.element.unit, self.element
        if unit is None or element.again is None:
            return [(None, element.stored)]
        options = [(Choice(unit, False), element.stored)]
        if not key.none_later:
            options.append((Choice(unit, True), element.again))
            if allowed.segments and element.joins is not None and key.ends_again:
                options.append((Choice(unit, True, joins=True), element.joins))
            if allowed.offload and element.offloads is not None:
                options.append((Choice(unit, True, offloads=True), element.offloads))
        decided = next((choice for choice in key.chosen if choice.unit == unit), None)
        return [(choice, way) for choice, way in options if decided is None or _are_alike(choice, decided)]

    def reached(self, state: State, own: Kept, way: Way, choice: Choice | None, budget: int) -> State | None:
        """Return the partial plan that treats the element this way; None if it is over the budget."""
        brought = brought_by(state.brought, self.element, way)
        if max(in_use(state.kept, own, brought + state.coming, way, is_last=self.is_last)) > budget:
            return None
        return State(state.kept.and_(own), brought, way.offloaded or state.coming, state.seconds + way.seconds, choice, state)

    def next_keys(self, key: Key, way: Way, chosen: Choice | None, allowed: Allowed) -> list[Key]:
        others = frozenset(c for c in key.chosen if chosen is None or c.unit != chosen.unit)
        choices = others | {chosen} if chosen is not None and self.called_later else others
        ends_again = key.ends_again if chosen is None else chosen.again
        held = (key.held | way.kept) & self.contested_later
        following = Key(held, choices, ends_again and self.joined_later, key.none_later)
        may_be_last = allowed.offload and chosen is not None and chosen.again and not self.called_later
        return [following, following._replace(ends_again=False, none_later=True)] if may_be_last else [following]


def _are_alike(first: Choice, second: Choice) -> bool:
    """Return whether two calls of a unit are treated alike; only units that are called once are joined."""
    return first.again == second.again and first.offloads == second.offloads


def _steps(profile: Profile) -> Iterator[Walk]:
    """Iterate over the elements, each with what the walk needs to know of its neighbours."""
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
    """Return for each element whether the next unit may join the last one so far."""
    result = [False] * len(elements)
    for i in range(len(elements) - 2, -1, -1):
        following = elements[i + 1]
        result[i] = result[i + 1] if following.unit is None else following.joins is not None
    return result


# --- dropping states ------------------------------------------------------------------------------------------------


def not_dominated(states: list[State]) -> list[State]:
    """Keep the states that no other beats in bytes kept, bytes that come back and time; sort them by size."""
    states.sort(key=lambda state: (state.kept, _back(state), state.seconds))
    if len(states) <= FEW_STATES:
        return [state for i, state in enumerate(states) if not any(other.beats(state) for other in states[:i])]
    front: list[State] = []
    fastest: list[State] = []
    """The states of `front` by bytes that come back, each faster than the one before."""
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
    """Thin the fronts to about MOST_STATES; the smallest state of each stays, or a plan that fits might be missed."""
    if sum(map(len, fronts.values())) <= MOST_STATES:
        return fronts
    smallest = sorted(fronts, key=lambda key: fronts[key][0].kept)[: MOST_STATES // 2]
    return {key: _thin(fronts[key], MOST_STATES // len(smallest)) for key in smallest}


def _thin(front: list[State], most: int) -> list[State]:
    """Keep the fastest state of each size class, and the smallest of all."""
    smallest = front[0].kept.all
    grain = (front[-1].kept.all - smallest) // max(1, most - 1) + 1
    slots = {-1: front[0]}
    for state in front[1:]:
        slot = (state.kept.all - smallest) // grain
        if slot not in slots or state.seconds < slots[slot].seconds:
            slots[slot] = state
    return list(slots.values())
