"""Which units to compute again so that a step fits into a budget, at the least extra time. Pure: numbers in, a plan out.

A step is a row of elements, in the order of forward: calls of units, and the glue between them, which is always stored.
Each element keeps storages until its backward: what it saved or, if it is computed again, its inputs. Backward runs through the
row from its end, so when it comes to an element, exactly the elements before it still keep theirs:

    bytes(kept by all before it, and by itself) + what its own backward needs on top  <=  budget      at every element

and likewise in forward, where storages that linger anyway until it is over (16-bit copies of weights) do not count as kept.
Storages shared by several elements count once. That is why a plan is not a sum of savings, and why the peak of a plan is not
the sum of what is saved.

A unit that is given just what the unit before it returned can also join that one in a segment: it does not keep its input, which
comes back when the units before it in the segment are run once more. That costs time twice, and is for budgets that nothing else
keeps to.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

MOST_STATES = 6000
"""Partial plans compared at one element. Beyond, of those of about equal size only the fastest stay: the plan found still keeps
to the budget, and may be a little slower than the best one."""

FEW_STATES = 100
"""Up to so many are compared in all respects; beyond, bytes that count in forward decide nothing."""


@dataclass(frozen=True, slots=True)
class Way:
    """One of the ways to treat an element."""

    kept: frozenset[int]
    """Storages, by number, from its forward to its backward."""
    forward_extra: int
    """Its forward needs so many bytes beyond what elements before it keep."""
    backward_extra: int
    """Its backward, beyond what they and it keep; being computed again is a part of it."""
    seconds: float = 0.0
    """Of being computed again."""
    brought: int = 0
    """Bytes of the input that comes back with its segment, and is in use again until the backward of this unit is over."""


@dataclass(frozen=True, slots=True)
class Element:
    unit: int | None
    """Which unit this is a call of; None for glue."""
    stored: Way
    again: Way | None = None
    """None where it cannot be computed again: glue."""
    joins: Way | None = None
    """Computed again, in a segment with the unit before it; None where its input is not just what that one returned."""

    def way(self, *, again: bool, joins: bool) -> Way:
        if joins and self.joins is not None:
            return self.joins
        return self.again if again and self.again is not None else self.stored


class Kept(NamedTuple):
    """Bytes: all, and those that nothing else keeps in use while a unit's forward runs, or the loss is computed."""

    all: int = 0
    in_forward: int = 0
    at_loss: int = 0

    def and_(self, own: Kept) -> Kept:
        return Kept(self.all + own.all, self.in_forward + own.in_forward, self.at_loss + own.at_loss)


@dataclass(frozen=True, slots=True)
class Profile:
    """A step, measured."""

    units: tuple[str, ...]
    elements: tuple[Element, ...]
    sizes: Mapping[int, int]
    """Bytes of each storage."""
    floor: int
    """Bytes that every plan needs at some time: those of the update."""
    lingering: frozenset[int] = frozenset()
    """Storages that are in use until the model's own forward is over, whoever keeps them."""
    outlasting: frozenset[int] = frozenset()
    """Of them those that are in use until the last element's is, which is the loss."""

    def own(self, way: Way, held: Collection[int]) -> Kept:
        """Bytes that it keeps beyond those held."""
        new = [s for s in way.kept if s not in held]
        lingers = sum(self.sizes[s] for s in new if s in self.lingering)
        outlasts = sum(self.sizes[s] for s in new if s in self.outlasting)
        whole = sum(self.sizes[s] for s in new)
        return Kept(whole, whole - lingers, whole - outlasts)


@dataclass(frozen=True, slots=True)
class Solution:
    again: frozenset[int]
    """Units that are computed again."""
    seconds: float
    peak_bytes: int
    joins: frozenset[int] = frozenset()
    """Of them those that join the unit before them in a segment."""


def peak_bytes(profile: Profile, again: Iterable[int], joins: Iterable[int] = ()) -> int:
    """The largest number of bytes in use at any time of a step, if these units are computed again."""
    chosen, joining = set(again), set(joins)
    held: set[int] = set()
    kept, brought, peak = Kept(), 0, profile.floor
    for element in profile.elements:
        way = element.way(again=element.unit in chosen, joins=element.unit in joining)
        own = profile.own(way, held)
        brought = brought_by(brought, element, way)
        peak = max(peak, *in_use(kept, own, brought, way, is_last=element is profile.elements[-1]))
        held |= way.kept
        kept = kept.and_(own)
    return peak


def in_use(kept: Kept, own: Kept, brought: int, way: Way, *, is_last: bool) -> tuple[int, int]:
    """Bytes in the forward of an element and in its backward, given what those before it keep."""
    forward = (kept.at_loss if is_last else kept.in_forward) + way.forward_extra
    return forward, kept.all + own.all + brought + way.backward_extra


def brought_by(before: int, element: Element, way: Way) -> int:
    """Bytes that have come back with the segment, when backward is at this element. Glue does not end a segment."""
    if element.unit is None:
        return before
    return before + way.brought if way.brought else 0


def seconds_added(profile: Profile, again: Iterable[int], joins: Iterable[int] = ()) -> float:
    chosen, joining = set(again), set(joins)
    return sum(e.way(again=e.unit in chosen, joins=e.unit in joining).seconds for e in profile.elements)


def cheapest(profile: Profile, budget: int, *, segments: bool = False) -> Solution | None:
    """The plan of least extra time whose peak is within the budget; None if there is none. `segments`: units may be joined."""
    if profile.floor > budget:
        return None
    fronts: dict[Key, list[State]] = {Key(frozenset(), frozenset(), False): [State(Kept(), 0, 0.0, None, None)]}
    for step in _steps(profile):
        grown: dict[Key, list[State]] = {}
        for key, states in fronts.items():
            for chosen, way in step.ways(key, segments=segments):
                own = profile.own(way, key.held | step.always_held)
                reached = grown.setdefault(step.next_key(key, way, chosen), [])
                for state in states:
                    brought = brought_by(state.brought, step.element, way)
                    if max(in_use(state.kept, own, brought, way, is_last=step.is_last)) <= budget:
                        reached.append(State(state.kept.and_(own), brought, state.seconds + way.seconds, chosen, state))
        fronts = thinned({key: not_dominated(states) for key, states in grown.items() if states})
    ends = [state for states in fronts.values() for state in states]
    if not ends:
        return None
    best = min(ends, key=lambda state: (state.seconds, state.kept))
    choices = list(best.choices())
    again = frozenset(choice.unit for choice in choices if choice.again)
    joins = frozenset(choice.unit for choice in choices if choice.joins)
    return Solution(again, best.seconds, peak_bytes(profile, again, joins), joins)


def smallest_budget(profile: Profile, *, segments: bool = False) -> int:
    """The least peak that any plan has."""
    everything = {e.unit for e in profile.elements if e.again is not None and e.unit is not None}
    low, high = profile.floor - 1, peak_bytes(profile, everything)  # low: too little; high: enough
    while high - low > 1:
        middle = (low + high) // 2
        found = cheapest(profile, middle, segments=segments)
        low, high = (middle, high) if found is None else (low, found.peak_bytes)
    return high


# --- the walk -------------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    unit: int
    again: bool
    joins: bool


class Key(NamedTuple):
    """All of a partial plan that later elements can notice, beside the bytes it keeps."""

    held: frozenset[int]
    """Of storages that one plan keeps and another does not, and that a later element may keep too: those kept."""
    chosen: frozenset[Choice]
    """Of units that are called again later."""
    ends_again: bool
    """The last unit is computed again, and the next one may join it."""


@dataclass(frozen=True, slots=True)
class State:
    """A plan for the elements so far."""

    kept: Kept
    brought: int
    seconds: float
    chosen: Choice | None
    before: State | None

    def beats(self, other: State) -> bool:
        return (
            self.kept.all <= other.kept.all
            and self.seconds <= other.seconds
            and self.brought <= other.brought
            and self.kept.in_forward <= other.kept.in_forward
            and self.kept.at_loss <= other.kept.at_loss
        )

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

    def ways(self, key: Key, *, segments: bool) -> list[tuple[Choice | None, Way]]:
        unit, element = self.element.unit, self.element
        if unit is None or element.again is None:
            return [(None, element.stored)]
        found = [(Choice(unit, False, False), element.stored), (Choice(unit, True, False), element.again)]
        if segments and element.joins is not None and key.ends_again:
            found.append((Choice(unit, True, True), element.joins))
        decided = next((choice.again for choice in key.chosen if choice.unit == unit), None)
        return [(choice, way) for choice, way in found if decided is None or choice.again == decided]

    def next_key(self, key: Key, way: Way, chosen: Choice | None) -> Key:
        others = frozenset(c for c in key.chosen if chosen is None or c.unit != chosen.unit)
        remembered = others | {chosen} if chosen is not None and self.called_later else others
        ends_again = key.ends_again if chosen is None else chosen.again
        return Key((key.held | way.kept) & self.contested_later, remembered, ends_again and self.joined_later)


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
        always |= frozenset.intersection(*(way.kept for way in _ways(element)))
        mentioned |= _mentions(element)
        mentioned = {s for s in mentioned if last_mention[s] > i and s not in always}
        called_later = element.unit is not None and last_call[element.unit] > i
        yield Walk(element, before, frozenset(mentioned), called_later, joined_later[i], i == len(profile.elements) - 1)


def _ways(element: Element) -> list[Way]:
    return [way for way in (element.stored, element.again, element.joins) if way is not None]


def _mentions(element: Element) -> frozenset[int]:
    return frozenset().union(*(way.kept for way in _ways(element)))


def _joined_later(elements: tuple[Element, ...]) -> list[bool]:
    """Of each element, whether the next unit may join the last one so far."""
    found = [False] * len(elements)
    for i in range(len(elements) - 2, -1, -1):
        following = elements[i + 1]
        found[i] = found[i + 1] if following.unit is None else following.joins is not None
    return found


# --- few states -----------------------------------------------------------------------------------------------------


def not_dominated(states: list[State]) -> list[State]:
    """Those that no other beats in bytes kept, bytes brought back and time, by size."""
    states.sort(key=lambda state: (state.kept, state.brought, state.seconds))
    if len(states) <= FEW_STATES:
        return [state for i, state in enumerate(states) if not any(other.beats(state) for other in states[:i])]
    front: list[State] = []
    fastest: list[State] = []
    """Of the front: by bytes brought back, ever faster."""
    for state in states:
        place = bisect.bisect_right(fastest, state.brought, key=lambda known: known.brought)
        if place and fastest[place - 1].seconds <= state.seconds:
            continue
        front.append(state)
        end = place
        while end < len(fastest) and fastest[end].seconds >= state.seconds:
            end += 1
        fastest[place:end] = [state]
    return front


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
