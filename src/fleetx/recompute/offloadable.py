"""Which inputs of units are worth parking in host memory: those that nobody else has on the device afterwards. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from .profile import Element, Profile, Way
from .rows import Piece, lingering, total
from .trace import MODEL, Called, Ended, Tape

SPENT = 0.02
"""Of a copy's time, though it runs beside the computation: both share the device's memory."""
BEGUN = 1e-6
"""Seconds for any copy: nothing is parked for nothing."""


def parking_places(tape: Tape, row: Sequence[Piece]) -> dict[str, frozenset[int]]:
    """Of each unit: the places of those tensors among its arguments that leave the device in every call, if they are parked."""
    kept_anyway: frozenset[int] = frozenset().union(*(piece.saved for piece in row if piece.call is None))
    until_the_end, stirs = lingering(tape), _next_stirs(tape)
    found: dict[str, list[frozenset[int]]] = defaultdict(list)
    for call in (piece.call for piece in row if piece.call is not None):
        # In forward one that is there until the model's is over counts as such, parked or not; any other must end with the call.
        leaving = {
            s for s in call.parkable.values() if s in until_the_end or tape.ends.get(s, len(tape.events)) <= stirs[id(call)]
        }
        leaving -= kept_anyway | _elsewhere(call)
        found[call.name].append(frozenset(place for place, s in call.parkable.items() if s in leaving))
    return {name: frozenset.intersection(*places) for name, places in found.items()}


def _elsewhere(call: Called) -> set[int]:
    """Storages that other arguments share, which are not parked: views."""
    return {storage for storage, count in (Counter(call.inputs) - Counter(call.parkable.values())).items() if count}


def _next_stirs(tape: Tape) -> dict[int, int]:
    """Of each call: the next event after its end that could need memory, or the end of the model's forward."""
    found: dict[int, int] = {}
    following = len(tape.events)
    for i, event in reversed(list(enumerate(tape.events))):
        if isinstance(event, Ended):
            found[id(event.call)] = following
        if not isinstance(event, Ended) or event.call.name == MODEL:
            following = i
    return found


def parked_way(again: Way, parked: Collection[int], sizes: Mapping[int, int], bytes_per_second: float) -> Way:
    """What of both copies is not hidden behind the unit's own computation costs time."""
    count = total(sizes, parked)
    copying = count / bytes_per_second
    return replace(
        again,
        kept=again.kept - frozenset(parked),
        backward_extra=again.backward_extra + count,
        seconds=again.seconds + 2 * max(0.0, copying - again.seconds) + SPENT * copying + BEGUN,
        parked=count,
    )


def with_parking(
    profile: Profile, row: Sequence[Piece], places: Mapping[str, frozenset[int]], bytes_per_second: float
) -> Profile:
    """The profile of this row, with one more way for each unit whose inputs can be parked."""

    def of(element: Element, piece: Piece) -> Element:
        if element.again is None or piece.call is None or not places[piece.call.name]:
            return element
        parked = {piece.call.parkable[place] for place in places[piece.call.name]}
        return replace(element, parks=parked_way(element.again, parked, profile.sizes, bytes_per_second))

    elements = tuple(of(element, piece) for element, piece in zip(profile.elements, row, strict=True))
    return replace(profile, elements=elements, places=tuple(places[name] for name in profile.units))
