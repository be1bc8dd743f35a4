"""Choose units from a trace, and split a forward into the row of pieces that a plan is made for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .trace import MODEL, Called, Ended, Saved, Trace

WORTH_A_UNIT = 0.01
"""Share of all saved bytes: modules that save less are left to the glue."""
SPLIT_ABOVE = 1 / 16
"""Share of all saved bytes: a module that saves more is split, if its parts, computed again one by one, free nearly as much."""
SPLIT_BLOCK_ABOVE = 1 / 4
"""Share above which a block that the model repeats is split; such a block is a good unit by itself."""
PARTS_FREE = 0.7
"""Share of a module's freed bytes that its parts must free for it to be split."""
MOST_UNITS = 96


@dataclass(frozen=True, slots=True)
class Piece:
    """A call of a unit, or glue (`call` is None), with the storages that it saves and those of its inputs."""

    call: Called | None
    saved: frozenset[int]
    inputs: frozenset[int]


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of each module that was called."""

    saved: Mapping[str, int]
    """Bytes saved in its calls, parts included."""
    freed: Mapping[str, int]
    """Bytes freed if it alone is computed again: those that only it saves, less inputs that nothing else saves."""
    total: int
    """Bytes saved by the whole model."""


def weights(trace: Trace) -> Weights:
    """Sum up what each module saves, and what computing it again alone would free."""
    saves: dict[str, Counter[int]] = defaultdict(Counter)
    everywhere: Counter[int] = Counter()
    for storage, inside in saves_of(trace):
        everywhere[storage] += 1
        for name in inside:
            saves[name][storage] += 1
    inputs: dict[str, set[int]] = defaultdict(set)
    for call in trace.calls():
        inputs[call.name].update(call.inputs)

    def freed(name: str) -> int:
        own = {storage for storage, count in saves[name].items() if count == everywhere[storage]}
        return total(trace.sizes, own - inputs[name]) - total(trace.sizes, inputs[name] - everywhere.keys())

    return Weights(
        saved={name: total(trace.sizes, storages) for name, storages in saves.items()},
        freed={name: max(0, freed(name)) for name in saves},
        total=total(trace.sizes, everywhere),
    )


def saves_of(trace: Trace) -> Iterator[tuple[int, set[str]]]:
    """Iterate over saves: the storage, and the names of the modules in whose calls it was saved."""
    stack: list[str] = []
    for event in trace.events:
        if isinstance(event, Called):
            stack.append(event.name)
        elif isinstance(event, Ended):
            stack.pop()
        else:
            yield event.storage, set(stack)


def saved_storages(trace: Trace) -> dict[str, set[int]]:
    """Return the storages saved in each module's calls, parts included."""
    storages: dict[str, set[int]] = defaultdict(set)
    for storage, inside in saves_of(trace):
        for name in inside:
            storages[name].add(storage)
    return storages


def total(sizes: Mapping[int, int], storages: Iterable[int]) -> int:
    return sum(sizes[s] for s in storages)


def good_units(trace: Trace, blocks: Collection[str], *, only: Collection[str] | None = None) -> list[str]:
    """Choose modules to decide about, none inside another, in the order of their first call.

    A module that saves a large share is split, from the outside in. `blocks` are the model's repeated ones; `only` is the user's
    own choice, which is not split."""
    weigh = weights(trace)
    unable = {call.name for call in trace.calls() if not call.can_run_again}
    parts: dict[str | None, dict[str, None]] = defaultdict(dict)
    for call in trace.calls():
        if call.name in weigh.saved:
            parts[call.inside.name if call.inside is not None else None][call.name] = None

    def split(name: str) -> list[str]:
        inner = [part for part in parts[name] if part != name]
        if name == MODEL or name in unable or (inner and any(block.startswith(f"{name}.") for block in blocks)):
            return [unit for part in inner for unit in split(part)]
        is_large = weigh.saved[name] > weigh.total * (SPLIT_BLOCK_ABOVE if name in blocks else SPLIT_ABOVE)
        if is_large and sum(weigh.freed[part] for part in inner) >= PARTS_FREE * weigh.freed[name] > 0:
            return [unit for part in inner for unit in split(part)]
        return [name] if weigh.freed[name] >= WORTH_A_UNIT * weigh.total else []

    if only is not None:
        chosen = [name for name in only if name in weigh.saved and name not in unable]
    else:
        chosen = [unit for name in parts[None] for unit in split(name)]
    heaviest = set(sorted(dict.fromkeys(chosen), key=lambda name: -weigh.freed[name])[:MOST_UNITS])
    return [name for name in _in_order(trace) if name in _outermost(trace, heaviest)]


def _in_order(trace: Trace) -> list[str]:
    return list(dict.fromkeys(call.name for call in trace.calls()))


def _outermost(trace: Trace, names: set[str]) -> set[str]:
    """Remove names whose modules are called inside another of them, or inside themselves, as a shared module may be."""
    nested: set[str] = set()
    for call in trace.calls():
        above = call.inside
        while call.name in names and above is not None:
            if above.name in names:
                nested.add(call.name)
            above = above.inside
    return names - nested


def lingering(trace: Trace) -> frozenset[int]:
    """Return storages alive until the model's forward is over in any case: 16-bit copies of weights, lists of results."""
    ends = [i for i, event in enumerate(trace.events) if isinstance(event, Ended) and event.call.name == MODEL]
    return _alive_until(trace, ends[-1] if ends else len(trace.events))


def outlasting(trace: Trace) -> frozenset[int]:
    """Return storages alive until the last tensor is saved, which is in the loss."""
    return _alive_until(trace, len(trace.events))


def _alive_until(trace: Trace, event: int) -> frozenset[int]:
    return frozenset(number for number in trace.sizes if trace.ends.get(number, event) >= event)


def pieces(trace: Trace, units: Collection[str]) -> list[Piece]:
    """Split the forward into calls of units with glue before, between and after them.

    The last piece is glue; so is the one before it, which ends with the model's own forward."""
    row: list[Piece] = []
    saved: set[int] = set()
    inside: Called | None = None

    def end_piece() -> None:
        row.append(Piece(inside, frozenset(saved), frozenset(inside.inputs if inside is not None else ())))
        saved.clear()

    for event in trace.events:
        if isinstance(event, Called) and event.name in units:
            end_piece()
            inside = event
        elif isinstance(event, Ended) and (event.call is inside or event.call.name == MODEL):
            end_piece()
            inside = None
        elif isinstance(event, Saved):
            saved.add(event.storage)
    end_piece()
    return row
