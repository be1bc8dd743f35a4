"""Measure one step with every unit computed again, piece by piece: from it the peak of every other plan is predicted.

That step needs little memory, so it can run where the plain one would not fit; and it runs each unit twice, without saving
(forward) and with (when it is computed again). Memory is read where a piece begins and ends:

    forward     | glue | unit 1 | glue | unit 2 | glue, loss |
    backward                                     | loss, glue | unit 2 again | its backward, glue | unit 1 again | ...
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, final

import torch
from torch import Tensor, nn

from ..engine.modules.patching import patched
from ..errors import ConfigError
from .memory_probe import MemoryProbe
from .profile import Element, Profile, Way
from .rows import Piece, total
from .trace import MODEL

TIMED_STEPS = 3
NO_TIME = 1e-9
"""Seconds of a unit that backward never needed: small, but not 0, so that it is not chosen without need."""


@dataclass(slots=True)
class Readings:
    """Bytes in use around one piece."""

    at_start: int = 0
    """Bytes in use when its forward begins."""
    forward_peak: int = 0
    again_start: int = 0
    """Bytes in use when it begins to be computed again; 0 if it never is."""
    again_peak: int = 0
    backward_peak: int = 0


@final
class Marks:
    """Reads the memory where pieces of a step begin and end."""

    def __init__(self, pieces: Sequence[Piece], probe: MemoryProbe) -> None:
        self._pieces, self._probe = pieces, probe
        self.readings = [Readings() for _ in pieces]
        self._at = 0
        """Index of the piece whose forward or backward is under way."""
        self._again = {name: [i for i, p in enumerate(pieces) if _name(p) == name] for name in map(_name, pieces)}
        self._enter(0)

    def _enter(self, piece: int) -> None:
        self._at = piece
        self.readings[piece].at_start = self._probe.now()

    def forward_seam(self) -> None:
        """Read at the begin or end of a unit's call."""
        self.readings[self._at].forward_peak = self._probe.peak()
        if self._at + 1 == len(self._pieces):
            raise path_changed()
        self._enter(self._at + 1)

    def forward_ended(self) -> None:
        self.readings[self._at].forward_peak = self._probe.peak()

    def again_begins(self, name: str) -> None:
        self._read_backward()
        calls = self._again[name]
        if not calls:
            raise path_changed()
        self._at = calls.pop()
        self.readings[self._at].again_start = self._probe.now()

    def again_ends(self) -> None:
        reading = self.readings[self._at]
        reading.again_peak = max(reading.again_peak, self._probe.peak())

    def backward_ended(self) -> None:
        self._read_backward()

    def _read_backward(self) -> None:
        reading = self.readings[self._at]
        reading.backward_peak = max(reading.backward_peak, self._probe.peak())


def path_changed() -> ConfigError:
    """Return the error for a model that called other modules than in the step before."""
    return ConfigError(
        "recompute: the model called other modules in one step than in the next, for the same batch and the same random numbers, "
        'so no plan can be made. Name modules in recompute_configs["checkpoints"] instead of a "budget".'
    )


def _name(piece: Piece) -> str:
    return piece.call.name if piece.call is not None else ""


@final
class Stopwatch:
    """Times each second run of a unit, by name, in the order of backward."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, list[float]] = {}
        self._events: dict[str, list[tuple[Any, Any]]] = {}
        self._begun: Any = None

    def begin(self) -> None:
        self._begun = torch.cuda.Event(enable_timing=True) if self._on_gpu else time.perf_counter()
        if self._on_gpu:
            self._begun.record()

    def end(self, name: str) -> None:
        if self._on_gpu:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            self._events.setdefault(name, []).append((self._begun, ended))
        else:
            self._seconds.setdefault(name, []).append(time.perf_counter() - self._begun)

    def seconds(self) -> dict[str, list[float]]:
        if self._on_gpu:
            torch.cuda.synchronize()
        gpu = {name: [a.elapsed_time(b) / 1e3 for a, b in pairs] for name, pairs in self._events.items()}
        return {**self._seconds, **gpu}


@dataclass(slots=True)
class UnitHooks:
    """Functions to call around units: outside and inside of what computes them again."""

    outer: Callable[[], None] = lambda: None
    """Called where a unit's first run begins and ends."""
    begins: Callable[[str], None] = lambda name: None
    """Called where a unit's second run begins."""
    ends: Callable[[str], None] = lambda name: None
    """Called where a unit's second run ends."""
    _first: bool = field(default=False)

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.outer()
        self._first = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._first = False
            self.outer()

    def around_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        self.outer()
        return out

    def within(self, name: str) -> Callable[..., Any]:
        def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._first:
                return forward(*args, **kwargs)
            self.begins(name)
            try:
                return forward(*args, **kwargs)
            finally:  # torch ends a second run by an exception, once it has all it needs
                self.ends(name)

        return run


Again = Callable[[str, nn.Module], Callable[..., Any]]
"""Returns what is patched around a unit so that it is computed again."""


def run_hooked(units: Mapping[str, nn.Module], again: Again, hooks: UnitHooks, step: Callable[[], None]) -> None:
    """Run a step with hooks around units, and around the end of the model itself where `units` holds it."""
    own = [(name, module) for name, module in units.items() if name != MODEL]
    inner = [(module, hooks.within(name)) for name, module in own]
    middle = [(module, again(name, module)) for name, module in own]
    outer = [(module, hooks.around if name != MODEL else hooks.around_model) for name, module in units.items()]
    with patched([*inner, *middle, *outer]):
        step()


def measured(
    pieces: Sequence[Piece],
    units: Mapping[str, nn.Module],
    again: Again,
    probe: MemoryProbe,
    *,
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], None],
) -> list[Readings]:
    """Measure the memory of one step, piece by piece."""
    with probe.watching():
        marks = Marks(pieces, probe)
        hooks = UnitHooks(marks.forward_seam, marks.again_begins, lambda name: marks.again_ends())

        def step() -> None:
            loss = forward()
            marks.forward_ended()
            backward(loss)
            marks.backward_ended()

        run_hooked(units, again, hooks, step)
    return marks.readings


def timed(
    units: Mapping[str, nn.Module], again: Again, device: torch.device, step: Callable[[], None], *, steps: int = TIMED_STEPS
) -> dict[str, list[float]]:
    """Measure the seconds of each unit's second runs: medians over some steps, in the order of forward."""
    runs: list[dict[str, list[float]]] = []
    for _ in range(steps):
        watch = Stopwatch(device)
        run_hooked(units, again, UnitHooks(begins=lambda name, w=watch: w.begin(), ends=watch.end), step)  # type: ignore[misc]
        runs.append(watch.seconds())
    if len({tuple((name, len(found)) for name, found in sorted(run.items())) for run in runs}) > 1:
        raise path_changed()
    return {name: [median(run[name][i] for run in runs) for i in range(len(found))][::-1] for name, found in runs[0].items()}


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    """Time one step, to its end on the device."""
    begun = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def profile_of(
    pieces: Sequence[Piece],
    readings: Sequence[Readings],
    seconds: Mapping[str, Sequence[float]],
    *,
    sizes: Mapping[int, int],
    update_peak: int,
    lingering: frozenset[int] = frozenset(),
    outlasting: frozenset[int] = frozenset(),
) -> Profile:
    """Derive what each way of each piece needs beyond what is kept, from a step in which every unit was computed again."""
    names = list(dict.fromkeys(p.call.name for p in pieces if p.call is not None))
    times = {name: iter(values) for name, values in seconds.items()}
    kept: set[int] = set()
    elements: list[Element] = []
    previous: tuple[Piece, Way] | None = None
    calls = Counter(p.call.name for p in pieces if p.call is not None)
    for i, (piece, reading) in enumerate(zip(pieces, readings, strict=True)):
        is_last = i == len(pieces) - 1
        before = total(sizes, kept - (outlasting if is_last else lingering))
        if piece.call is None:
            kept |= piece.saved
            backward = reading.backward_peak - total(sizes, kept) if is_last else 0
            way = Way(piece.saved, reading.forward_peak - before, backward)
            elements.append(Element(None, way))
            continue
        stored, again = _ways(piece, reading, kept, before, sizes, next(times.get(piece.call.name, iter(())), NO_TIME))
        once = calls[piece.call.name] == 1
        joins = _joins(piece, previous, again, sizes) if once else None
        elements.append(Element(names.index(piece.call.name), stored, again, joins))
        previous = (piece, again) if once else None
        kept |= piece.inputs
    return Profile(tuple(names), tuple(elements), dict(sizes), update_peak, lingering, outlasting)


def _ways(
    piece: Piece, reading: Readings, kept: Collection[int], before: int, sizes: Mapping[int, int], seconds: float
) -> tuple[Way, Way]:
    """Return the ways stored and computed again; `kept` by the pieces before it, `before` bytes of which count in forward."""
    with_inputs = total(sizes, {*kept, *piece.inputs})
    growth = reading.again_peak - reading.again_start
    anything_else = reading.again_start - with_inputs
    # In use when it begins to be computed again, and kept by no piece: weights, gradients of activations.
    made = total(sizes, piece.saved - piece.inputs - set(kept))
    transient = max(0, reading.backward_peak - reading.again_start - made)
    if not reading.again_start:  # its outputs were not used by the loss
        growth = anything_else = transient = 0
    stored = Way(piece.saved, reading.at_start - before + growth, anything_else + transient)
    peak_again = max(reading.again_peak, reading.backward_peak)
    return stored, Way(piece.inputs, reading.forward_peak - before, max(0, peak_again - with_inputs), seconds)


def _joins(piece: Piece, previous: tuple[Piece, Way] | None, again: Way, sizes: Mapping[int, int]) -> Way | None:
    """Return the way of joining a segment with the unit before, if its input is what that one returned; else None."""
    if previous is None or piece.call is None:
        return None
    gift = next((storage for call, storage in piece.call.given_by if call is previous[0].call), None)
    if gift is None or gift not in again.kept:
        return None
    return replace(again, kept=again.kept - {gift}, seconds=again.seconds + previous[1].seconds, brought=sizes[gift])
