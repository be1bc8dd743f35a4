"""One step with every unit computed again, measured piece by piece: from it the peak of every other plan follows.

That step needs little memory, so it can be run where the plain one would not fit; and it shows each unit twice, without saving
(forward) and with (when it is computed again). Marks are set where a piece begins and ends:

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

from ..engine.patching import patched
from ..errors import ConfigError
from .memory_probe import Gauge
from .profile import Element, Profile, Way
from .rows import Piece, total
from .trace import MODEL

TIMED_STEPS = 3
NO_TIME = 1e-9
"""Seconds of a unit that backward never asked for: little, but not for nothing chosen."""


@dataclass(slots=True)
class Readings:
    """Of one piece, in bytes, all that is in use."""

    at_start: int = 0
    forward_peak: int = 0
    again_start: int = 0
    """When it begins to be computed again; 0 if it never is."""
    again_peak: int = 0
    backward_peak: int = 0


@final
class Marks:
    """Called at the seams of a step; keeps the readings of each piece."""

    def __init__(self, pieces: Sequence[Piece], gauge: Gauge) -> None:
        self._pieces, self._gauge = pieces, gauge
        self.readings = [Readings() for _ in pieces]
        self._at = 0
        """The piece whose forward, or backward, is under way."""
        self._again = {name: [i for i, p in enumerate(pieces) if _name(p) == name] for name in map(_name, pieces)}
        self._enter(0)

    def _enter(self, piece: int) -> None:
        self._at = piece
        self.readings[piece].at_start = self._gauge.now()

    def forward_seam(self) -> None:
        """A call of a unit begins or ends."""
        self.readings[self._at].forward_peak = self._gauge.peak()
        if self._at + 1 == len(self._pieces):
            raise another_way()
        self._enter(self._at + 1)

    def forward_ended(self) -> None:
        self.readings[self._at].forward_peak = self._gauge.peak()

    def again_begins(self, name: str) -> None:
        self._read_backward()
        calls = self._again[name]
        if not calls:
            raise another_way()
        self._at = calls.pop()
        self.readings[self._at].again_start = self._gauge.now()

    def again_ends(self) -> None:
        reading = self.readings[self._at]
        reading.again_peak = max(reading.again_peak, self._gauge.peak())

    def backward_ended(self) -> None:
        self._read_backward()

    def _read_backward(self) -> None:
        reading = self.readings[self._at]
        reading.backward_peak = max(reading.backward_peak, self._gauge.peak())


def another_way() -> ConfigError:
    return ConfigError(
        "recompute: the model called other modules in one step than in the next, for the same batch and the same random numbers, "
        'so no plan can be made. Name modules in recompute_configs["checkpoints"] instead of a "budget".'
    )


def _name(piece: Piece) -> str:
    return piece.call.name if piece.call is not None else ""


@final
class Stopwatch:
    """Seconds of each second run of a unit, by name, in the order of backward."""

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
class Probe:
    """Patches around units, outside and inside of what computes them again."""

    outer: Callable[[], None] = lambda: None
    begins: Callable[[str], None] = lambda name: None
    ends: Callable[[str], None] = lambda name: None
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
"""What is patched around a unit so that it is computed again."""


def run_probed(units: Mapping[str, nn.Module], again: Again, probe: Probe, step: Callable[[], None]) -> None:
    """`units` may hold the model itself, whose end is a seam too."""
    own = [(name, module) for name, module in units.items() if name != MODEL]
    inner = [(module, probe.within(name)) for name, module in own]
    middle = [(module, again(name, module)) for name, module in own]
    outer = [(module, probe.around if name != MODEL else probe.around_model) for name, module in units.items()]
    with patched([*inner, *middle, *outer]):
        step()


def measured(
    pieces: Sequence[Piece],
    units: Mapping[str, nn.Module],
    again: Again,
    gauge: Gauge,
    *,
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], None],
) -> list[Readings]:
    """Bytes: one step."""
    with gauge.watching():
        marks = Marks(pieces, gauge)
        probe = Probe(marks.forward_seam, marks.again_begins, lambda name: marks.again_ends())

        def step() -> None:
            loss = forward()
            marks.forward_ended()
            backward(loss)
            marks.backward_ended()

        run_probed(units, again, probe, step)
    return marks.readings


def timed(
    units: Mapping[str, nn.Module], again: Again, device: torch.device, step: Callable[[], None], *, steps: int = TIMED_STEPS
) -> dict[str, list[float]]:
    """Seconds of each second run, medians over some steps, in the order of forward."""
    runs: list[dict[str, list[float]]] = []
    for _ in range(steps):
        watch = Stopwatch(device)
        run_probed(units, again, Probe(begins=lambda name, w=watch: w.begin(), ends=watch.end), step)  # type: ignore[misc]
        runs.append(watch.seconds())
    if len({tuple((name, len(found)) for name, found in sorted(run.items())) for run in runs}) > 1:
        raise another_way()
    return {name: [median(run[name][i] for run in runs) for i in range(len(found))][::-1] for name, found in runs[0].items()}


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
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
    """What each way of each piece needs beyond what is kept, from a step in which every unit was computed again."""
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
    """Stored, and computed again; `kept` by the pieces before it, `before` bytes of which count in forward."""
    with_inputs = total(sizes, {*kept, *piece.inputs})
    growth = reading.again_peak - reading.again_start
    anything_else = reading.again_start - with_inputs
    """In use when it begins to be computed again, and kept by nobody: weights, gradients on their way."""
    made = total(sizes, piece.saved - piece.inputs - set(kept))
    transient = max(0, reading.backward_peak - reading.again_start - made)
    if not reading.again_start:  # its outputs had no part in the loss
        growth = anything_else = transient = 0
    stored = Way(piece.saved, reading.at_start - before + growth, anything_else + transient)
    peak_again = max(reading.again_peak, reading.backward_peak)
    return stored, Way(piece.inputs, reading.forward_peak - before, max(0, peak_again - with_inputs), seconds)


def _joins(piece: Piece, previous: tuple[Piece, Way] | None, again: Way, sizes: Mapping[int, int]) -> Way | None:
    """In a segment with the unit before, if it is given what that one returned, and they are called once each."""
    if previous is None or piece.call is None:
        return None
    gift = next((storage for call, storage in piece.call.given_by if call is previous[0].call), None)
    if gift is None or gift not in again.kept:
        return None
    return replace(again, kept=again.kept - {gift}, seconds=again.seconds + previous[1].seconds, brought=sizes[gift])
