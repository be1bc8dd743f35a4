"""The profiles of all ranks as one: the largest of each number, so that a plan holds everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .profile import Element, Profile, Way, peak_bytes


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
