"""Choose the inputs of units to keep in host memory: those that nothing else keeps on the device afterwards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from .profile import Element, Profile, Way
from .rows import Piece, lingering, total
from .trace import MODEL, Called, Ended, Trace

SPENT = 0.02
"""Share of a copy's time that it costs though it runs beside the computation: both use the device's memory."""
BEGUN = 1e-6
"""Seconds that any copy costs, so that none is planned without need."""


def offload_places(trace: Trace, row: Sequence[Piece]) -> dict[str, frozenset[int]]:
    """Return for each unit the places of those argument tensors that leave the device in every call, if offloaded."""
    kept_anyway: frozenset[int] = frozenset().union(*(piece.saved for piece in row if piece.call is None))
    until_the_end, next_events = lingering(trace), _next_events(trace)
    by_unit: dict[str, list[frozenset[int]]] = defaultdict(list)
    for call in (piece.call for piece in row if piece.call is not None):
        # What lives until the model's forward is over counts as lingering, offloaded or not; all else must end with the call.
        leaving = {
            s
            for s in call.offloadable.values()
            if s in until_the_end or trace.ends.get(s, len(trace.events)) <= next_events[id(call)]
        }
        leaving -= kept_anyway | _elsewhere(call)
        by_unit[call.name].append(frozenset(place for place, s in call.offloadable.items() if s in leaving))
    return {name: frozenset.intersection(*places) for name, places in by_unit.items()}


def _elsewhere(call: Called) -> set[int]:
    """Return storages that are shared with arguments that cannot be offloaded: views."""
    return {storage for storage, count in (Counter(call.inputs) - Counter(call.offloadable.values())).items() if count}


def _next_events(trace: Trace) -> dict[int, int]:
    """Return for each call the next event after its end that may need memory, or the end of the model's forward."""
    by_call: dict[int, int] = {}
    following = len(trace.events)
    for i, event in reversed(list(enumerate(trace.events))):
        if isinstance(event, Ended):
            by_call[id(event.call)] = following
        if not isinstance(event, Ended) or event.call.name == MODEL:
            following = i
    return by_call


def offloaded_way(again: Way, offloaded: Collection[int], sizes: Mapping[int, int], bytes_per_second: float) -> Way:
    """Return the way with these inputs offloaded; the part of both copies that exceeds the unit's own computation costs time."""
    count = total(sizes, offloaded)
    copying = count / bytes_per_second
    return replace(
        again,
        kept=again.kept - frozenset(offloaded),
        backward_extra=again.backward_extra + count,
        seconds=again.seconds + 2 * max(0.0, copying - again.seconds) + SPENT * copying + BEGUN,
        offloaded=count,
    )


def with_offload(
    profile: Profile, row: Sequence[Piece], places: Mapping[str, frozenset[int]], bytes_per_second: float
) -> Profile:
    """Add to the profile of this row one more way for each unit whose inputs can be offloaded."""

    def of(element: Element, piece: Piece) -> Element:
        if element.again is None or piece.call is None or not places[piece.call.name]:
            return element
        offloaded = {piece.call.offloadable[place] for place in places[piece.call.name]}
        return replace(element, offloads=offloaded_way(element.again, offloaded, profile.sizes, bytes_per_second))

    elements = tuple(of(element, piece) for element, piece in zip(profile.elements, row, strict=True))
    return replace(profile, elements=elements, places=tuple(places[name] for name in profile.units))
