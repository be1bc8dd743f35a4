"""Trace what a forward saves for backward, and in which module: run it once with every module watched.

Each tensor that autograd would save is recorded and dropped at once, so this run needs less memory than any other with gradients.
Storages that are alive when the run is over were there before it (weights, buffers, the batch), and are not counted as saved.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn

from ..engine.modules.compiling import compiled_by
from ..engine.modules.nested_tensors import tensors_in
from ..engine.modules.patching import patched
from .memory_probe import storage_of
from .offload import is_offloadable

MODEL = ""
"""The name of the model itself."""


@dataclass(slots=True, eq=False)
class Called:
    """One call of a module."""

    name: str
    inside: Called | None
    """The call that contains it; None for the model's own."""
    inputs: list[int]
    """Numbers of its arguments' storages."""
    can_run_again: bool = True
    """Whether it ran with gradients enabled and changed no input."""
    given_by: list[tuple[Called, int]] = field(default_factory=list)
    """Calls whose result, a single tensor, is among its arguments, unchanged; with the number of its storage."""
    offloadable: dict[int, int] = field(default_factory=dict)
    """Numbers of the storages of arguments that can be offloaded, by their place among all its argument tensors."""


@dataclass(frozen=True, slots=True)
class Saved:
    storage: int


@dataclass(frozen=True, slots=True)
class Ended:
    call: Called


Event = Called | Saved | Ended


@dataclass(slots=True)
class Trace:
    """A forward as a list of events: a call begins, a tensor is saved, a call ends."""

    events: list[Event] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage that the forward made, by number."""
    ends: dict[int, int] = field(default_factory=dict)
    """Number of events before each storage was freed, though no save kept it; without those that outlive the last event."""

    def calls(self) -> Iterator[Called]:
        return (event for event in self.events if isinstance(event, Called))


class Returned(NamedTuple):
    """A tensor that a call returned."""

    tensor: weakref.ref[Tensor]
    version: int
    call: Called

    def is_still(self, tensor: Tensor) -> bool:
        return self.tensor() is tensor and tensor._version == self.version


@final
class Numbers:
    """Numbers storages, each by a number of its own even where memory is reused."""

    def __init__(self, gone: Callable[[int], Any]) -> None:
        self.sizes: dict[int, int] = {}
        self._alive: dict[int, tuple[int, Any]] = {}
        self._gone = gone

    def of(self, tensor: Tensor) -> int | None:
        storage = storage_of(tensor)
        if storage is None:
            return None
        known = self._alive.get(storage._cdata)
        if known is not None:
            return known[0]
        number, place = len(self.sizes), storage._cdata
        self.sizes[number] = storage.nbytes()

        def ends(_: Any) -> None:
            self._alive.pop(place, None)
            self._gone(number)

        self._alive[place] = (number, weakref.ref(storage, ends))
        return number

    def alive(self) -> set[int]:
        gc.collect()
        return {number for number, _ in self._alive.values()}


def record(model: nn.Module, candidates: Mapping[str, nn.Module], run: Callable[[], Tensor]) -> Trace:
    """Trace `run`, which computes the loss; storages that outlive it are left out."""
    trace, stack, returned = Trace(), list[Called](), list[Returned]()
    numbers = Numbers(lambda number: trace.ends.setdefault(number, len(trace.events)))

    def around(name: str) -> Callable[..., Any]:
        def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            tensors = tensors_in((args, kwargs))
            versions = [0 if t.is_inference() else t._version for t in tensors]
            known = [(place, t, number) for place, t in enumerate(tensors) if (number := numbers.of(t)) is not None]
            called = Called(name, stack[-1] if stack else None, [number for _, _, number in known], torch.is_grad_enabled())
            called.offloadable = {place: number for place, t, number in known if is_offloadable(t)}
            called.given_by = [
                (r.call, number) for r in returned for t in tensors if r.is_still(t) and (number := numbers.of(t)) is not None
            ]
            trace.events.append(called)
            stack.append(called)
            try:
                out = forward(*args, **kwargs)
                if isinstance(out, Tensor):
                    returned[:] = [r for r in returned if r.tensor() is not None]
                    returned.append(Returned(weakref.ref(out), out._version, called))
                return out
            finally:
                stack.pop()
                changed = [0 if t.is_inference() else t._version for t in tensors] != versions
                called.can_run_again = called.can_run_again and not changed
                trace.events.append(Ended(called))

        return call

    def pack(tensor: Tensor) -> None:
        number = numbers.of(tensor)
        if number is not None:
            trace.events.append(Saved(number))

    if any(compiled_by(module) is not None for module in model.modules()):
        pack = torch.compiler.disable(pack)  # it is called inside of compiled code, and would be compiled itself

    def unpack(_: None) -> NoReturn:
        raise RuntimeError("what was saved in this forward has been dropped: a forward may not run a backward here")

    # A parent that computes for its children in one call goes on to do so, as in every other run.
    with patched(((module, around(name)) for name, module in candidates.items()), only_outermost=True):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = run()
        del loss
    kept = numbers.alive()
    trace.sizes = {number: size for number, size in numbers.sizes.items() if number not in kept}
    counts = [not isinstance(event, Saved) or event.storage in trace.sizes for event in trace.events]
    places = [0, *itertools.accumulate(counts)]
    trace.ends = {number: places[end] for number, end in trace.ends.items()}
    trace.events = list(itertools.compress(trace.events, counts))
    for called in trace.calls():
        called.inputs = [number for number in called.inputs if number in trace.sizes]
        called.offloadable = {place: number for place, number in called.offloadable.items() if number in trace.sizes}
    return trace
