"""What a step needs, as a row of elements in the order of forward: calls of units, and the glue between them, always stored.

Each element keeps storages until its backward: what it saved or, if it is computed again, its inputs. Backward runs through the
row from its end, so when it comes to an element, exactly the elements before it still keep theirs:

    bytes(kept by all before it, and by itself) + what its own backward needs on top  <=  budget      at every element

and likewise in forward, where storages that linger anyway until it is over (16-bit copies of weights) do not count as kept.
Storages shared by several elements count once. That is why a plan is not a sum of savings, and why the peak of a plan is not
the sum of what is saved.

A unit computed again may also park inputs in host memory. They are back for its own backward, and on their way before: from the
moment when the next unit after it is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# --- The profiles of all ranks as one: the largest of each number, so that a plan holds everywhere --------------------


def to_plain(profile: Profile) -> dict[str, Any]:
    def way(one: Way | None) -> Any:
        if one is None:
            return None
        return [sorted(one.kept), one.forward_extra, one.backward_extra, one.seconds, one.brought, one.parked]

    return {
        "units": list(profile.units),
        "elements": [[e.unit, *map(way, (e.stored, e.again, e.joins, e.parks))] for e in profile.elements],
        "sizes": sorted(profile.sizes.items()),
        "floor": profile.floor,
        "lingering": sorted(profile.lingering),
        "outlasting": sorted(profile.outlasting),
        "places": [sorted(places) for places in profile.places],
    }


def from_plain(told: Any) -> Profile:
    def way(one: Any) -> Any:
        return None if one is None else Way(frozenset(one[0]), *one[1:])

    elements = [Element(unit, *map(way, ways)) for unit, *ways in told["elements"]]
    lingering, outlasting = (frozenset(told[name]) for name in ("lingering", "outlasting"))
    places = tuple(map(frozenset, told["places"]))
    return Profile(tuple(told["units"]), tuple(elements), dict(told["sizes"]), told["floor"], lingering, outlasting, places)


def joined(profiles: Sequence[Profile]) -> Profile:
    """The largest of each number. Ranks whose batches took other ways through the model cannot be joined: the heaviest counts."""
    heaviest = max(profiles, key=lambda p: peak_bytes(p, ()))
    if not all(p.is_like(heaviest) for p in profiles):
        return heaviest
    elements = [
        Element(e[0].unit, *(_largest([getattr(one, way) for one in e]) for way in ("stored", "again", "joins", "parks")))
        for e in zip(*(p.elements for p in profiles), strict=True)
    ]
    sizes = {s: max(p.sizes[s] for p in profiles) for s in heaviest.sizes}
    return Profile(
        heaviest.units,
        tuple(elements),
        sizes,
        floor=max(p.floor for p in profiles),
        lingering=frozenset.intersection(*(p.lingering for p in profiles)),
        outlasting=frozenset.intersection(*(p.outlasting for p in profiles)),
        places=heaviest.places,
    )


def _largest(ways: Sequence[Way | None]) -> Any:
    given = [way for way in ways if way is not None]
    if not given:
        return None
    return Way(
        given[0].kept,
        max(way.forward_extra for way in given),
        max(way.backward_extra for way in given),
        max(way.seconds for way in given),
        max(way.brought for way in given),
        max(way.parked for way in given),
    )


# ----------------------------------------------------------------------------------------------------------------------


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
    parked: int = 0
    """Bytes of the inputs that are in host memory instead of being kept; in its own backward they are a part of the extra."""


@dataclass(frozen=True, slots=True)
class Element:
    unit: int | None
    """Which unit this is a call of; None for glue."""
    stored: Way
    again: Way | None = None
    """None where it cannot be computed again: glue."""
    joins: Way | None = None
    """Computed again, in a segment with the unit before it; None where its input is not just what that one returned."""
    parks: Way | None = None
    """Computed again, with inputs in host memory; None where none of them would leave the device."""

    def way(self, *, again: bool, joins: bool, parks: bool = False) -> Way:
        if joins and self.joins is not None:
            return self.joins
        if parks and self.parks is not None:
            return self.parks
        return self.again if again and self.again is not None else self.stored

    def ways(self) -> list[Way]:
        return [way for way in (self.stored, self.again, self.joins, self.parks) if way is not None]


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
    places: tuple[frozenset[int], ...] = ()
    """Of each unit: which of its arguments' tensors, counted in order, it parks if it does. Empty where no unit can."""

    def is_like(self, other: Profile) -> bool:
        """The same units, storages and elements; bytes and seconds may differ."""
        return self._form() == other._form()

    def _form(self) -> object:
        ways = [
            (e.unit, *(None if way is None else way.kept for way in (e.stored, e.again, e.joins, e.parks))) for e in self.elements
        ]
        return self.units, ways, set(self.sizes), self.places

    def own(self, way: Way, held: Collection[int]) -> Kept:
        """Bytes that it keeps beyond those held."""
        new = [s for s in way.kept if s not in held]
        lingers = sum(self.sizes[s] for s in new if s in self.lingering)
        outlasts = sum(self.sizes[s] for s in new if s in self.outlasting)
        whole = sum(self.sizes[s] for s in new)
        return Kept(whole, whole - lingers, whole - outlasts)


class Passing(NamedTuple):
    """An element in a step by a plan."""

    element: Element
    kept: Kept
    """By it and those before it."""
    forward: int
    """Bytes in use at the most in its forward."""
    backward: int


def passings(profile: Profile, again: Iterable[int], joins: Iterable[int], parks: Iterable[int]) -> Iterator[Passing]:
    """The step element by element, if these units are computed again."""
    chosen, joining, parking = set(again), set(joins), set(parks)
    last_again = max((i for i, e in enumerate(profile.elements) if e.unit in chosen), default=-1)
    held: set[int] = set()
    kept, brought, coming = Kept(), 0, 0
    for i, element in enumerate(profile.elements):
        way = element.way(again=element.unit in chosen, joins=element.unit in joining, parks=element.unit in parking)
        own = profile.own(way, held)
        brought = brought_by(brought, element, way)
        back = brought + (coming if i <= last_again else 0)
        forward, backward = in_use(kept, own, back, way, is_last=i == len(profile.elements) - 1)
        held |= way.kept
        kept = kept.and_(own)
        coming = way.parked or coming
        yield Passing(element, kept, forward, backward)


def peak_bytes(profile: Profile, again: Iterable[int], joins: Iterable[int] = (), parks: Iterable[int] = ()) -> int:
    """The largest number of bytes in use at any time of a step, if these units are computed again."""
    return max([profile.floor, *(max(p.forward, p.backward) for p in passings(profile, again, joins, parks))])


def in_use(kept: Kept, own: Kept, back: int, way: Way, *, is_last: bool) -> tuple[int, int]:
    """Bytes in the forward of an element and in its backward, given what those before it keep, and what of them has come back."""
    forward = (kept.at_loss if is_last else kept.in_forward) + way.forward_extra
    return forward, kept.all + own.all + back + way.backward_extra


def brought_by(before: int, element: Element, way: Way) -> int:
    """Bytes that have come back with the segment, when backward is at this element. Glue does not end a segment."""
    if element.unit is None:
        return before
    return before + way.brought if way.brought else 0


def host_bytes(profile: Profile, parks: Collection[int]) -> int:
    """In host memory at the end of forward: a tensor that several units park is there once."""
    parked: set[int] = set()
    for element in profile.elements:
        if element.unit in parks and element.again is not None and element.parks is not None:
            parked |= element.again.kept - element.parks.kept
    return sum(profile.sizes[storage] for storage in parked)
