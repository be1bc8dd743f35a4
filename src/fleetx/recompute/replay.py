"""Compute a module's forward again in backward: keep its inputs, and drop what it saved.

    forward     runs as usual; inputs, RNG state and the buffers that it changes are recorded, activations are not
    backward    before it needs the first of them, forward runs again, with the RNG state, buffers, modes, autocast and other
                ranks' answers of the first run; afterwards all of these are as if it had not run

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

from ..engine.modules.nested_tensors import tensors_in
from ..engine.modules.patching import Outermost, as_inside, inside
from ..engine.modules.random_states import Source, States, held_sources, kept, set_back, torch_sources
from ..errors import RecomputeError, first_line
from .buffers import BufferSnapshot, Place
from .offload import CallOffload, Offload, restored
from .segments import LastOutput, restore_inputs

Answer = TypeVar("Answer")
ModuleState = dict[str, Any]
"""A module's mode and its parameters, which torch.func.functional_call may replace for one forward."""
LEAVE_OUT = 'leave it out of recompute_configs["checkpoints"]'


class _Thread(threading.local):
    """What runs in this thread."""

    ask: Callable[[Callable[[], Any]], Any] | None = None
    """How the unit that runs, for the first time or again, asks other ranks; None: no unit runs."""
    for_backward: nn.Module | None = None
    """The unit that runs again only for what it saves; None: there is none."""


_thread = _Thread()


def agreed(ask: Callable[[], Answer]) -> Answer:
    """Ask the other ranks by a collective; a unit that runs again gets the answer of its first run instead.

    Units may run again in any order, and a second collective would not match the other ranks'."""
    answer: Answer = ask() if _thread.ask is None else _thread.ask(ask)
    return answer


def result_is_unwanted(module: nn.Module) -> bool:
    """Return whether this module runs again only for what it saves, so that its result is not used.

    A module that ends with a large product may then leave that out, if it saves nothing but the product's inputs."""
    return _thread.for_backward is module


@contextlib.contextmanager
def _for_backward(module: nn.Module) -> Iterator[None]:
    """Mark the module as running again only for what it saves."""
    before, _thread.for_backward = _thread.for_backward, module
    try:
        yield
    finally:
        _thread.for_backward = before


@contextlib.contextmanager
def _asks(how: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Answer questions to other ranks by `how` inside."""
    before, _thread.ask = _thread.ask, how
    try:
        yield
    finally:
        _thread.ask = before


@dataclass(slots=True, weakref_slot=True)
class Call:
    """One call of a unit, recorded for its second run."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    modules: list[nn.Module]
    module_states: list[ModuleState]
    buffers: BufferSnapshot
    inside: frozenset[Outermost]
    unchanging: list[Tensor]
    """Inputs, weights and uncopied buffers, which must not change before the second run; `versions` are their versions."""
    versions: list[int]
    random: States = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    """Other ranks' answers in the first run, in order."""
    offload: CallOffload | None = None
    """Its inputs in host memory; None where the model offloads none."""


@final
class Replay:
    """Computes one unit again; installed around its forward by patch_forward."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        device: torch.device,
        *,
        joins: Replay | None = None,
        offload: Offload | None = None,
        offload_places: Collection[int] | None = None,
        fits_a_graph: bool = False,
    ) -> None:
        """Join the segment of the unit before, if `joins` is given. `offload` is shared by all units of a model; `offload_places`
        are the places of the inputs that this unit keeps in host memory, None for all. With `fits_a_graph` torch's compiler may
        do the same in its own way; otherwise its graph breaks here, since plans are kept to the byte."""
        self._name, self._module, self._joins = name, module, joins
        self._offload, self._offload_places = offload, offload_places
        self._last: LastOutput | None = None
        self._fits_a_graph = fits_a_graph
        self._shared_sources, self._drawn = torch_sources(device), set[Source]()
        self._written: set[Place] | None = None
        """Places of the buffers that its first call wrote; None before that call."""

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self._fits_a_graph:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # Of this the compiler makes one graph, which computes again what it is told to; random numbers and buffers included.
            return checkpoint(lambda: forward(*args, **kwargs), use_reentrant=False)
        if not torch.is_grad_enabled() or _thread.ask is not None:
            return forward(*args, **kwargs)  # nothing is saved, or a unit around this one is computed again anyway
        call, first = self._record(args, kwargs), [(args, kwargs)]

        def run() -> Any:
            if first:
                args, kwargs = first.pop()  # the caller's own lists, which forward may write to
                with self._first(call, (*args, *kwargs.values())):
                    return forward(*args, **kwargs)
            restore_inputs(call)
            with _for_backward(self._module):
                return self._run_again(forward, call, is_own=True)

        with self._offloaded(call):
            # RNG state is kept here: torch looks for devices among positional arguments alone, and leaves out Python's generator.
            out = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        if self._joins is not None and self._joins._last is not None:
            self._joins._last.drop_from(call)
        self._last = LastOutput(out, call, partial(self._run_again, forward)) if isinstance(out, Tensor) else None
        return out

    def _run_again(self, forward: Callable[..., Any], call: Call, *, is_own: bool = False) -> Any:
        """Run forward again: for its own backward (`is_own`), or for the units after it in its segment."""
        args, kwargs = copy_containers(call.arguments)
        if self._offload is not None and call.offload is not None:
            args, kwargs = restored((args, kwargs)) if call.offload.tensors else (args, kwargs)
            if is_own:
                self._offload.advance(call.offload)
        with self._again(call):
            return forward(*args, **kwargs)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        passed = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        modules = list(dict.fromkeys(module for root in (self._module, *passed) for module in root.modules()))
        buffers = BufferSnapshot(modules, self._written)
        unchanging = [*tensors_in((args, kwargs)), *weights_of(modules), *buffers.uncopied]
        return Call(
            arguments=copy_containers((args, kwargs)),
            modules=modules,
            module_states=[{"training": module.training, "_parameters": dict(module._parameters)} for module in modules],
            buffers=buffers,
            inside=inside(),
            unchanging=unchanging,
            versions=versions_of(unchanging),
        )

    @contextlib.contextmanager
    def _offloaded(self, call: Call) -> Iterator[None]:
        """Offload inputs beside the first run, and drop them from the device after it."""
        if self._offload is None:
            yield
            return
        call.offload = self._offload.begin(call.arguments, self._offload_places)
        try:
            yield
        finally:
            call.offload.settle(call)

    # --- the first run ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _first(self, call: Call, values: Sequence[Any]) -> Iterator[None]:
        def ask_and_record(ask: Callable[[], Any]) -> Any:
            call.answers.append(ask())
            return call.answers[-1]

        attributes = itertools.chain.from_iterable(vars(module).values() for module in call.modules)
        sources = [*self._shared_sources, *held_sources(itertools.chain(values, attributes))]
        with kept(sources, self._drawn, call.random), _asks(ask_and_record), self._errors_name_it():
            yield
        changed = first_changed(call)
        if changed is not None:
            what, why = self._describe(changed)
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
        """Name the unit in torch's error that its second run saved other tensors than the first."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)  # those of `checkpoint`
        name = self._name

        def unpack_or_name(holder: Any) -> Any:
            try:
                return unpack(holder)
            except MetadataMismatch as mismatch:
                raise rerun_differs(name, first_line(mismatch)) from mismatch

        with saved_tensors_hooks(pack, unpack_or_name):
            yield

    def _describe(self, tensor: Tensor) -> tuple[str, str]:
        """Describe what the tensor is, and how the unit's own forward may change it."""
        for name, weight in self._module.named_parameters():
            if weight is tensor:
                return f"the weight `{name}`", "in forward, not in the optimizer's step"
        for name, buffer in self._module.named_buffers():
            if buffer is tensor:
                return f"the buffer `{name}`", "first in a later call: of a large one that its first call leaves, no copy is made"
        return "an input", "as relu_ or `x += ...` do"

    # --- the second run ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _again(self, call: Call) -> Iterator[None]:
        changed = first_changed(call)
        if changed is not None:
            raise RecomputeError(
                f"recompute: {self._describe(changed)[0]} of `{self._name}` was changed in place after its forward, so it cannot "
                f"be computed again. Change it after backward, or a copy of it, or {LEAVE_OUT}.",
                unit=self._name,
            )
        answers = call.answers[::-1]

        def next_answer(ask: Callable[[], Any]) -> Any:
            if not answers:
                raise rerun_differs(self._name, "it asked the other ranks once more")
            return answers.pop()

        with (
            set_back(call.random),
            call.buffers.put_back(),
            _put_back(call.modules, call.module_states),
            as_inside(call.inside),
            _asks(next_answer),
        ):
            yield


@contextlib.contextmanager
def _put_back(modules: Sequence[nn.Module], recorded: Sequence[ModuleState]) -> Iterator[None]:
    """Run the block with the recorded modes and parameters."""
    now = [{key: vars(module)[key] for key in own} for module, own in zip(modules, recorded, strict=True)]
    try:
        for module, own in zip(modules, recorded, strict=True):
            vars(module).update(own)
        yield
    finally:
        for module, own in zip(modules, now, strict=True):
            vars(module).update(own)


def weights_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Collect weights, without those of embeddings with max_norm: forward shortens their rows, and again changes nothing."""
    return [
        weight
        for module in modules
        if getattr(module, "max_norm", None) is None or not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for weight in module._parameters.values()
        if weight is not None
    ]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return versions; 0 for tensors made in inference mode, which have none and cannot be changed outside it."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def first_changed(call: Call) -> Tensor | None:
    """Return the first tensor changed since the call; None if there is none."""
    versions = versions_of(call.unchanging)
    if versions == call.versions:
        return None
    return next(t for t, now, then in zip(call.unchanging, versions, call.versions, strict=True) if now != then)


def copy_containers(value: Any) -> Any:
    """Copy lists, tuples and dictionaries, not what they hold: forward may change the containers that it is given."""
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item) for item in value)
    return value


def rerun_differs(name: str, how: str) -> RecomputeError:
    """Return the error for a unit whose second run differs from its first."""
    return RecomputeError(
        f"recompute: `{name}` computed something else when it was run again in backward. Its forward depends on what has "
        "changed since: an attribute that it counts up, a cache, a global, or data. Make its forward depend on its inputs "
        f"alone, or {LEAVE_OUT}. ({how})",
        unit=name,
    )
