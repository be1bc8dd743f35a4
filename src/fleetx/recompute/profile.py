"""Describe a step's memory as a row of elements in the order of forward: calls of units, and the glue between them.

Each element keeps storages until its backward: what it saved or, if it is computed again, its inputs. Glue is always stored.
Backward runs through the row from its end, so when it comes to an element, exactly the elements before it still keep theirs:

    bytes(kept by all before it, and by itself) + what its own backward needs on top  <=  budget      at every element

and likewise in forward, where storages that linger until it is over anyway (16-bit copies of weights) do not count as kept.
Storages shared by several elements count once. Therefore a plan is not a sum of savings, and its peak is not the sum of what is
saved.

A unit computed again may also keep inputs in host memory. They are fetched while the next unit after it is computed again, and
are on the device for its own backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Way:
    """What one way to treat an element keeps and costs."""

    kept: frozenset[int]
    """Numbers of the storages that it keeps from its forward to its backward."""
    forward_extra: int
    """Bytes that its forward needs beyond what the elements before it keep."""
    backward_extra: int
    """Bytes that its backward, with the second run, needs beyond what it and the elements before it keep."""
    seconds: float = 0.0
    """Time of computing it again; 0.0 where it is stored."""
    brought: int = 0
    """Bytes of the input that its segment brings back, in use again until the backward of this unit is over."""
    offloaded: int = 0
    """Bytes of the inputs in host memory; its own backward counts them in `backward_extra`."""


@dataclass(frozen=True, slots=True)
class Element:
    """A call of a unit, or glue, with the ways to treat it."""

    unit: int | None
    """Index of the unit; None for glue."""
    stored: Way
    """What it saves stays until its backward."""
    again: Way | None = None
    """Computed again from its inputs; None for glue."""
    joins: Way | None = None
    """Computed again in a segment with the unit before it; None where its input is not just what that one returned."""
    offloads: Way | None = None
    """Computed again from inputs in host memory; None where none of them would leave the device."""

    def way(self, *, again: bool, joins: bool, offloads: bool = False) -> Way:
        if joins and self.joins is not None:
            return self.joins
        if offloads and self.offloads is not None:
            return self.offloads
        return self.again if again and self.again is not None else self.stored

    def ways(self) -> list[Way]:
        return [way for way in (self.stored, self.again, self.joins, self.offloads) if way is not None]


KINDS = ("stored", "again", "joins", "offloads")
"""The ways of an element, by the names of its fields."""


class Kept(NamedTuple):
    """Bytes kept: all, and those that count while a unit's forward runs, or while the loss is computed."""

    all: int = 0
    in_forward: int = 0
    at_loss: int = 0

    def and_(self, own: Kept) -> Kept:
        return Kept(self.all + own.all, self.in_forward + own.in_forward, self.at_loss + own.at_loss)


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured step."""

    units: tuple[str, ...]
    """Names of the units."""
    elements: tuple[Element, ...]
    """The row, in the order of forward."""
    sizes: Mapping[int, int]
    """Bytes of each storage."""
    floor: int
    """Bytes that every plan needs at some time, namely in the update."""
    lingering: frozenset[int] = frozenset()
    """Storages that are in use until the model's forward is over in any case."""
    outlasting: frozenset[int] = frozenset()
    """Those of `lingering` that are in use until the loss, the last element, is computed."""
    places: tuple[frozenset[int], ...] = ()
    """Places for each unit, among its argument tensors, of those kept in host memory; empty where no unit can."""

    def is_like(self, other: Profile) -> bool:
        """Return whether units, storages and elements are the same; bytes and seconds may differ."""
        return self._form() == other._form()

    def _form(self) -> object:
        ways = [
            (e.unit, *(None if way is None else way.kept for way in (e.stored, e.again, e.joins, e.offloads)))
            for e in self.elements
        ]
        return self.units, ways, set(self.sizes), self.places

    def own(self, way: Way, held: Collection[int]) -> Kept:
        """Return the bytes that a way keeps beyond the storages in `held`."""
        new = [s for s in way.kept if s not in held]
        lingers = sum(self.sizes[s] for s in new if s in self.lingering)
        outlasts = sum(self.sizes[s] for s in new if s in self.outlasting)
        whole = sum(self.sizes[s] for s in new)
        return Kept(whole, whole - lingers, whole - outlasts)


class Passing(NamedTuple):
    """The memory of one element in a step by a plan."""

    element: Element
    kept: Kept
    """Bytes kept by it and the elements before it."""
    forward: int
    """The most bytes in use in its forward."""
    backward: int
    """The most bytes in use in its backward."""


def passings(profile: Profile, again: Iterable[int], joins: Iterable[int], offloads: Iterable[int]) -> Iterator[Passing]:
    """Walk through a step element by element, with these units computed again."""
    chosen, joining, offloading = set(again), set(joins), set(offloads)
    last_again = max((i for i, e in enumerate(profile.elements) if e.unit in chosen), default=-1)
    held: set[int] = set()
    kept, brought, coming = Kept(), 0, 0
    for i, element in enumerate(profile.elements):
        way = element.way(again=element.unit in chosen, joins=element.unit in joining, offloads=element.unit in offloading)
        own = profile.own(way, held)
        brought = brought_by(brought, element, way)
        back = brought + (coming if i <= last_again else 0)
        forward, backward = in_use(kept, own, back, way, is_last=i == len(profile.elements) - 1)
        held |= way.kept
        kept = kept.and_(own)
        coming = way.offloaded or coming
        yield Passing(element, kept, forward, backward)


def peak_bytes(profile: Profile, again: Iterable[int], joins: Iterable[int] = (), offloads: Iterable[int] = ()) -> int:
    """Return the peak of bytes in use during a step, with these units computed again."""
    return max([profile.floor, *(max(p.forward, p.backward) for p in passings(profile, again, joins, offloads))])


def in_use(kept: Kept, own: Kept, back: int, way: Way, *, is_last: bool) -> tuple[int, int]:
    """Return the bytes in use in an element's forward and in its backward; `kept` by those before it, `back` brought back."""
    forward = (kept.at_loss if is_last else kept.in_forward) + way.forward_extra
    return forward, kept.all + own.all + back + way.backward_extra


def brought_by(before: int, element: Element, way: Way) -> int:
    """Return the bytes that the segment has brought back when backward is at this element. Glue does not end a segment."""
    if element.unit is None:
        return before
    return before + way.brought if way.brought else 0


def host_bytes(profile: Profile, offloads: Collection[int]) -> int:
    """Return the bytes in host memory at the end of forward; a tensor that several units offload counts once."""
    offloaded: set[int] = set()
    for element in profile.elements:
        if element.unit in offloads and element.again is not None and element.offloads is not None:
            offloaded |= element.again.kept - element.offloads.kept
    return sum(profile.sizes[storage] for storage in offloaded)


# --- the profiles of all ranks as one: the largest of each number, so that a plan holds everywhere --------------------


def to_plain(profile: Profile) -> dict[str, Any]:
    """Turn a profile into plain numbers for JSON."""

    def numbers(way: Way | None) -> Any:
        if way is None:
            return None
        return [sorted(way.kept), way.forward_extra, way.backward_extra, way.seconds, way.brought, way.offloaded]

    return {
        "units": list(profile.units),
        "elements": [[e.unit, *map(numbers, (e.stored, e.again, e.joins, e.offloads))] for e in profile.elements],
        "sizes": sorted(profile.sizes.items()),
        "floor": profile.floor,
        "lingering": sorted(profile.lingering),
        "outlasting": sorted(profile.outlasting),
        "places": [sorted(places) for places in profile.places],
    }


def from_plain(plain: Any) -> Profile:
    """Read what `to_plain` returned."""

    def way(numbers: Any) -> Any:
        return None if numbers is None else Way(frozenset(numbers[0]), *numbers[1:])

    elements = [Element(unit, *map(way, ways)) for unit, *ways in plain["elements"]]
    lingering, outlasting = (frozenset(plain[name]) for name in ("lingering", "outlasting"))
    places = tuple(map(frozenset, plain["places"]))
    return Profile(tuple(plain["units"]), tuple(elements), dict(plain["sizes"]), plain["floor"], lingering, outlasting, places)


def joined(profiles: Sequence[Profile]) -> Profile:
    """Take the largest of each number; if the ranks' batches took different paths through the model, the heaviest profile."""
    heaviest = max(profiles, key=lambda p: peak_bytes(p, ()))
    if not all(p.is_like(heaviest) for p in profiles):
        return heaviest
    elements = [
        Element(calls[0].unit, *(_largest([getattr(call, kind) for call in calls]) for kind in KINDS))
        for calls in zip(*(p.elements for p in profiles), strict=True)
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
    present = [way for way in ways if way is not None]
    if not present:
        return None
    return Way(
        present[0].kept,
        max(way.forward_extra for way in present),
        max(way.backward_extra for way in present),
        max(way.seconds for way in present),
        max(way.brought for way in present),
        max(way.offloaded for way in present),
    )
