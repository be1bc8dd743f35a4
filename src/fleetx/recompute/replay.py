"""A module's forward, computed again in backward: what it saved for it is dropped, its inputs are kept.

    forward     runs as ever; inputs, random states and the buffers that it changes are remembered, activations are not
    backward    before it needs the first of them, forward runs again, in the world of then: random numbers, buffers, modes,
                autocast, and what other ranks said; afterwards everything is as if it had not

Everything is equal to the bit: gradients, random numbers afterwards, running statistics, which count each batch once.
The engine is torch.utils.checkpoint, without re-entering autograd.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError as MetadataMismatch
from torch.utils.checkpoint import checkpoint

from ..engine.patching import as_inside, inside
from ..engine.random_states import Source, States, held_sources, kept, set_back, torch_sources
from ..engine.trees import tensors_in
from ..errors import RecomputeError, first_line
from .buffers import Buffers, Place
from .offload import Parking, Stay, unparked
from .segments import LastCall, bring_back

Found = TypeVar("Found")
Own = dict[str, Any]
"""Of a module: whether it trains, and its parameters, which torch.func.functional_call puts there for the forward alone."""
LEAVE_OUT = 'leave it out of recompute_configs["checkpoints"]'


class _Here(threading.local):
    ask: Callable[[Callable[[], Any]], Any] | None = None
    """How the unit that runs in this thread, for the first time or again, asks other ranks. None: no unit runs."""
    for_backward: nn.Module | None = None
    """The unit that runs again, for what it saves alone."""


_here = _Here()


def agreed(ask: Callable[[], Found]) -> Found:
    """Ask the other ranks. A unit that runs again hears what they said then: nobody is asked twice, in whatever order units
    are run again."""
    answer: Found = ask() if _here.ask is None else _here.ask(ask)
    return answer


def result_is_unwanted(module: nn.Module) -> bool:
    """Whether this very module runs again for what it saves: what it returns goes nowhere. One that ends with a large product
    may leave that out, if all it saves there is what goes in."""
    return _here.for_backward is module


@contextlib.contextmanager
def _for_backward(module: nn.Module) -> Iterator[None]:
    before, _here.for_backward = _here.for_backward, module
    try:
        yield
    finally:
        _here.for_backward = before


@contextlib.contextmanager
def _asks(how: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    before, _here.ask = _here.ask, how
    try:
        yield
    finally:
        _here.ask = before


@dataclass(slots=True, weakref_slot=True)
class Call:
    """One call of a unit, remembered for its second run."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    modules: list[nn.Module]
    owns: list[Own]
    buffers: Buffers
    inside: frozenset[int]
    unchanging: list[Tensor]
    """Inputs, weights and the buffers of which there is no copy."""
    versions: list[int]
    random: States = field(default_factory=list)
    said: list[Any] = field(default_factory=list)
    """What was agreed with other ranks in it, in order."""
    stay: Stay | None = None
    """Which of its inputs are in host memory; None where none of any unit are."""


@final
class Replay:
    """Around the forward of one unit (patch_forward)."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        device: torch.device,
        *,
        joins: Replay | None = None,
        parking: Parking | None = None,
        parks: Collection[int] | None = None,
    ) -> None:
        """`joins`: the unit before, which this one shares a segment with. `parking`: shared by all units of a model; `parks`: the
        places of the inputs that this one parks there, None for all."""
        self._name, self._module, self._joins = name, module, joins
        self._parking, self._parks = parking, parks
        self._last: LastCall | None = None
        self._shared_sources, self._drawn = torch_sources(device), set[Source]()
        self._written: set[Place] | None = None
        """Buffers that its first call wrote; None before it."""

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _here.ask is not None:
            return forward(*args, **kwargs)  # nothing is saved; or a unit around this one is computed again anyway
        call, first = self._remembered(args, kwargs), [(args, kwargs)]

        def run() -> Any:
            if first:
                args, kwargs = first.pop()  # the caller's own lists: forward may leave something in them
                with self._first(call, (*args, *kwargs.values())):
                    return forward(*args, **kwargs)
            bring_back(call)
            with _for_backward(self._module):
                return self._run_again(forward, call, is_own=True)

        with self._parked(call):
            # Random states are ours to keep: torch looks for devices among positional arguments alone, and not at Python's.
            out = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        if self._joins is not None and self._joins._last is not None:
            self._joins._last.drop_from(call)
        self._last = LastCall(out, call, partial(self._run_again, forward)) if isinstance(out, Tensor) else None
        return out

    def _run_again(self, forward: Callable[..., Any], call: Call, *, is_own: bool = False) -> Any:
        """Its own second run; else one for the units after it in its segment."""
        args, kwargs = fresh(call.arguments)
        if self._parking is not None and call.stay is not None:
            args, kwargs = unparked((args, kwargs)) if call.stay.parked else (args, kwargs)
            if is_own:
                self._parking.go_on(call.stay)
        with self._again(call):
            return forward(*args, **kwargs)

    def _remembered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        modules = list(dict.fromkeys(module for root in (self._module, *given) for module in root.modules()))
        buffers = Buffers(modules, self._written)
        unchanging = [*tensors_in((args, kwargs)), *weights_of(modules), *buffers.uncopied]
        return Call(
            arguments=fresh((args, kwargs)),
            modules=modules,
            owns=[{"training": module.training, "_parameters": dict(module._parameters)} for module in modules],
            buffers=buffers,
            inside=inside(),
            unchanging=unchanging,
            versions=versions_of(unchanging),
        )

    @contextlib.contextmanager
    def _parked(self, call: Call) -> Iterator[None]:
        """Around the first run: inputs leave beside it, and are gone after it."""
        if self._parking is None:
            yield
            return
        call.stay = self._parking.begin(call.arguments, self._parks)
        try:
            yield
        finally:
            call.stay.settle(call)

    # --- the first run ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _first(self, call: Call, values: Sequence[Any]) -> Iterator[None]:
        def ask_and_note(ask: Callable[[], Any]) -> Any:
            call.said.append(ask())
            return call.said[-1]

        attributes = itertools.chain.from_iterable(vars(module).values() for module in call.modules)
        sources = [*self._shared_sources, *held_sources(itertools.chain(values, attributes))]
        with kept(sources, self._drawn, call.random), _asks(ask_and_note), self._errors_name_it():
            yield
        changed = first_changed(call)
        if changed is not None:
            what, why = self._told(changed)
            raise RecomputeError(
                f"recompute: `{self._name}` changes {what} in place ({why}), so it cannot be computed again. Let it work on a "
                f"copy, or {LEAVE_OUT}.",
                unit=self._name,
            )
        if self._written is None:
            self._written = call.buffers.written()
            call.unchanging += call.buffers.uncopied
            call.versions += versions_of(call.buffers.uncopied)

    @contextlib.contextmanager
    def _errors_name_it(self) -> Iterator[None]:
        """torch notices, when it wants a tensor back, that a second run saved other ones, and does not say of what."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)  # those of `checkpoint`
        name = self._name

        def unpack_or_name(holder: Any) -> Any:
            try:
                return unpack(holder)
            except MetadataMismatch as mismatch:
                raise computes_something_else(name, first_line(mismatch)) from mismatch

        with saved_tensors_hooks(pack, unpack_or_name):
            yield

    def _told(self, tensor: Tensor) -> tuple[str, str]:
        """What it is, and how its own forward may come to change it."""
        for name, weight in self._module.named_parameters():
            if weight is tensor:
                return f"the weight `{name}`", "in forward, not in the optimizer's step"
        for name, buffer in self._module.named_buffers():
            if buffer is tensor:
                return f"the buffer `{name}`", "first in a later call: of a large one that its first call leaves, no copy is made"
        return "an input", "as relu_ or `x += ...` do"

    # --- the second -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _again(self, call: Call) -> Iterator[None]:
        changed = first_changed(call)
        if changed is not None:
            raise RecomputeError(
                f"recompute: {self._told(changed)[0]} of `{self._name}` was changed in place after its forward, so it cannot be "
                f"computed again. Change it after backward, or a copy of it, or {LEAVE_OUT}.",
                unit=self._name,
            )
        said = call.said[::-1]

        def hear(ask: Callable[[], Any]) -> Any:
            if not said:
                raise computes_something_else(self._name, "it asked the other ranks once more")
            return said.pop()

        with (
            set_back(call.random),
            call.buffers.put_back(),
            _put_back(call.modules, call.owns),
            as_inside(call.inside),
            _asks(hear),
        ):
            yield


@contextlib.contextmanager
def _put_back(modules: Sequence[nn.Module], then: Sequence[Own]) -> Iterator[None]:
    now = [{key: vars(module)[key] for key in own} for module, own in zip(modules, then, strict=True)]
    try:
        for module, own in zip(modules, then, strict=True):
            vars(module).update(own)
        yield
    finally:
        for module, own in zip(modules, now, strict=True):
            vars(module).update(own)


def weights_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Not those of an embedding with a largest norm: it shortens rows in each forward, and a second time changes nothing."""
    return [
        weight
        for module in modules
        if getattr(module, "max_norm", None) is None or not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for weight in module._parameters.values()
        if weight is not None
    ]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Those made in inference mode have none: nobody may change them outside it."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def first_changed(call: Call) -> Tensor | None:
    versions = versions_of(call.unchanging)
    if versions == call.versions:
        return None
    return next(t for t, now, then in zip(call.unchanging, versions, call.versions, strict=True) if now != then)


def fresh(value: Any) -> Any:
    """The same things in lists and dictionaries of their own: forward may take things out of those that it is given."""
    if type(value) is dict:
        return {key: fresh(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(fresh(item) for item in value)
    return value


def computes_something_else(name: str, how: str) -> RecomputeError:
    return RecomputeError(
        f"recompute: `{name}` computed something else when it was run again in backward. Its forward depends on what has "
        "changed since: an attribute that it counts up, a cache, a global, or data. Make its forward depend on its inputs "
        f"alone, or {LEAVE_OUT}. ({how})",
        unit=name,
    )
