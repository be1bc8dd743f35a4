"""From a tape to units, and from units to the row of elements that a plan is made for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .trace import MODEL, Called, Ended, Saved, Tape

WORTH_A_UNIT = 0.01
"""Of all saved bytes: modules that save less are left to the glue."""
SPLIT_ABOVE = 1 / 16
"""A module that saves more is taken apart, where its parts, computed again one by one, free nearly as much."""
SPLIT_BLOCK_ABOVE = 1 / 4
"""The same for a block that the model repeats: it is a good unit by itself."""
PARTS_FREE = 0.7
MOST_UNITS = 96


@dataclass(frozen=True, slots=True)
class Piece:
    """A call of a unit, or glue, with the storages that it would save and those that it is given."""

    call: Called | None
    saved: frozenset[int]
    inputs: frozenset[int]


@dataclass(frozen=True, slots=True)
class Weights:
    """In bytes, of each module that was called."""

    saved: Mapping[str, int]
    freed: Mapping[str, int]
    """Fewer are kept if it alone is computed again: what only it has saved goes, inputs that nobody has saved come."""
    total: int
    """Saved by the whole model."""


def weights(tape: Tape) -> Weights:
    saves: dict[str, Counter[int]] = defaultdict(Counter)
    everywhere: Counter[int] = Counter()
    for storage, inside in saves_of(tape):
        everywhere[storage] += 1
        for name in inside:
            saves[name][storage] += 1
    inputs: dict[str, set[int]] = defaultdict(set)
    for call in tape.calls():
        inputs[call.name].update(call.inputs)

    def freed(name: str) -> int:
        own = {storage for storage, count in saves[name].items() if count == everywhere[storage]}
        return total(tape.sizes, own - inputs[name]) - total(tape.sizes, inputs[name] - everywhere.keys())

    return Weights(
        saved={name: total(tape.sizes, found) for name, found in saves.items()},
        freed={name: max(0, freed(name)) for name in saves},
        total=total(tape.sizes, everywhere),
    )


def saves_of(tape: Tape) -> Iterator[tuple[int, set[str]]]:
    """Each storage that is saved, as often as it is, with the modules in whose calls that is."""
    stack: list[str] = []
    for event in tape.events:
        if isinstance(event, Called):
            stack.append(event.name)
        elif isinstance(event, Ended):
            stack.pop()
        else:
            yield event.storage, set(stack)


def saved_storages(tape: Tape) -> dict[str, set[int]]:
    """By each module's calls, its parts' too."""
    found: dict[str, set[int]] = defaultdict(set)
    for storage, inside in saves_of(tape):
        for name in inside:
            found[name].add(storage)
    return found


def total(sizes: Mapping[int, int], storages: Iterable[int]) -> int:
    return sum(sizes[s] for s in storages)


def good_units(tape: Tape, blocks: Collection[str], *, only: Collection[str] | None = None) -> list[str]:
    """Modules to decide about, none inside another, in the order of their first call.

    From the outside in: a module that saves a large share is taken apart. `blocks` are the model's repeated ones; `only`: the
    user's own choice, to which all this does not apply."""
    weigh = weights(tape)
    unable = {call.name for call in tape.calls() if not call.can_run_again}
    parts: dict[str | None, dict[str, None]] = defaultdict(dict)
    for call in tape.calls():
        if call.name in weigh.saved:
            parts[call.inside.name if call.inside is not None else None][call.name] = None

    def taken_apart(name: str) -> list[str]:
        inner = [part for part in parts[name] if part != name]
        if name == MODEL or name in unable or (inner and any(block.startswith(f"{name}.") for block in blocks)):
            return [unit for part in inner for unit in taken_apart(part)]
        is_large = weigh.saved[name] > weigh.total * (SPLIT_BLOCK_ABOVE if name in blocks else SPLIT_ABOVE)
        if is_large and sum(weigh.freed[part] for part in inner) >= PARTS_FREE * weigh.freed[name] > 0:
            return [unit for part in inner for unit in taken_apart(part)]
        return [name] if weigh.freed[name] >= WORTH_A_UNIT * weigh.total else []

    if only is not None:
        chosen = [name for name in only if name in weigh.saved and name not in unable]
    else:
        chosen = [unit for name in parts[None] for unit in taken_apart(name)]
    heaviest = set(sorted(dict.fromkeys(chosen), key=lambda name: -weigh.freed[name])[:MOST_UNITS])
    return [name for name in _in_order(tape) if name in _outermost(tape, heaviest)]


def _in_order(tape: Tape) -> list[str]:
    return list(dict.fromkeys(call.name for call in tape.calls()))


def _outermost(tape: Tape, names: set[str]) -> set[str]:
    """Without those that are called inside another of them, or inside themselves: a shared module may be both."""
    nested: set[str] = set()
    for call in tape.calls():
        above = call.inside
        while call.name in names and above is not None:
            if above.name in names:
                nested.add(call.name)
            above = above.inside
    return names - nested


def lingering(tape: Tape) -> frozenset[int]:
    """Storages that are there by themselves until the model's own forward is over: 16-bit copies of weights, lists of results."""
    ends = [i for i, event in enumerate(tape.events) if isinstance(event, Ended) and event.call.name == MODEL]
    return _alive_until(tape, ends[-1] if ends else len(tape.events))


def outlasting(tape: Tape) -> frozenset[int]:
    """Those that are there until the last tensor is saved, which is in the loss."""
    return _alive_until(tape, len(tape.events))


def _alive_until(tape: Tape, event: int) -> frozenset[int]:
    return frozenset(number for number in tape.sizes if tape.ends.get(number, event) >= event)


def pieces(tape: Tape, units: Collection[str]) -> list[Piece]:
    """The forward as calls of units with glue before, between and after them. The last piece is glue; so is the one before it,
    which ends with the model's own forward."""
    found: list[Piece] = []
    saved: set[int] = set()
    inside: Called | None = None

    def end_piece() -> None:
        found.append(Piece(inside, frozenset(saved), frozenset(inside.inputs if inside is not None else ())))
        saved.clear()

    for event in tape.events:
        if isinstance(event, Called) and event.name in units:
            end_piece()
            inside = event
        elif isinstance(event, Ended) and (event.call is inside or event.call.name == MODEL):
            end_piece()
            inside = None
        elif isinstance(event, Saved):
            saved.add(event.storage)
    end_piece()
    return found
