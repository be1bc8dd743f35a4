"""Change a module's forward in place, so that class, names and state dict stay the user's and copies stay plain."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import nn

from .plain_copy import ABSENT, STAND_IN, StandIn, keep_copies_plain

# --- Which patches of a forward this thread is inside of: one that acts on the outermost call alone asks --------------


class Outermost:
    """What acts on the outermost call of a forward alone, and so asks whether one is under way."""

    def __init__(self) -> None:
        self.is_entered = False
        """Whether a call is under way, for compiled code, since torch's compiler can read an attribute, and makes a new graph
        when it changes, but not a ContextVar. It is of all threads: where one is inside while another calls compiled code from
        outside, that one is taken for inside too."""
        self._entered = 0

    def is_under_way(self) -> bool:
        """Return whether the caller is inside of such a call."""
        return self.is_entered if torch.compiler.is_compiling() else self in _who.get()

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Mark the block as inside of such a call."""
        if torch.compiler.is_compiling():
            before, self.is_entered = self.is_entered, True
            try:
                yield
            finally:
                self.is_entered = before
        else:
            with as_inside(inside() | {self}):
                yield

    def count(self, by: int) -> None:
        """Let compiled code know of one more or one less that is under way."""
        with _counting:
            self._entered += by
            self.is_entered = self._entered > 0


_counting = threading.Lock()
_who: ContextVar[frozenset[Outermost]] = ContextVar("who", default=frozenset())


def inside() -> frozenset[Outermost]:
    """Return those under way. Code that runs a part of a forward later, or in another thread, takes them along."""
    return _who.get()


@contextlib.contextmanager
def as_inside(who: frozenset[Outermost]) -> Iterator[None]:
    token = _who.set(who)
    before = token.old_value if isinstance(token.old_value, frozenset) else frozenset()
    changes = [(one, 1) for one in who - before] + [(one, -1) for one in before - who]
    for one, by in changes:
        one.count(by)
    try:
        yield
    finally:
        for one, by in changes:
            one.count(-by)
        _who.reset(token)


# ----------------------------------------------------------------------------------------------------------------------

Forward = Callable[..., Any]


@final
class PatchedForward(StandIn):
    """What stands in for a module's forward. A copy of the module (deepcopy, pickle) has what stood there before.

    In `module.__dict__["forward"]` lies a function that calls it: torch's compiler guards the graph of a module by the code of a
    function in that place, so that equal blocks share one graph, but by the identity of anything else."""

    place = "forward"

    def __init__(
        self, module: nn.Module, around: Callable[..., Any], *, only_outermost: bool, is_of_the_whole: bool = False
    ) -> None:
        self.module = module
        before = module.__dict__.get("forward", ABSENT)
        outer = patch_in(before)
        self.inner: Forward = module.forward if outer is None else outer
        self._replaced = before if outer is None else outer.replaced()
        self.around = around
        self._only_outermost, self._is_of_the_whole = only_outermost, is_of_the_whole
        functools.update_wrapper(self, self.inner, updated=())  # the signature stays readable: Hugging Face asks for it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.inner, *args, **kwargs)

    def as_function(self) -> types.FunctionType:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        # Of each class its own code: the compiler limits how many graphs it makes of one.
        function = types.FunctionType(_code_for(type(self.module), forward.__code__), globals(), closure=forward.__closure__)
        functools.update_wrapper(function, self.inner, updated=())
        setattr(function, STAND_IN, self)
        return function

    @property
    def only_outermost(self) -> bool:
        """It acts on a call from outside the model alone: a parent that computes for its children at once may go past it."""
        inner = self.inner
        return self._only_outermost and (not isinstance(inner, PatchedForward) or inner.only_outermost)

    @property
    def is_of_the_whole(self) -> bool:
        """It acts on all that the module computes: no part of that may be left to another."""
        inner = self.inner
        return self._is_of_the_whole or (isinstance(inner, PatchedForward) and inner.is_of_the_whole)

    def original(self) -> Forward:
        """Return the forward before any patch."""
        inner = self.inner
        while isinstance(inner, PatchedForward):
            inner = inner.inner
        return inner

    def replaced(self) -> Any:
        """Return the forward that the user had set on this very module, or ABSENT: then the class's serves."""
        return self._replaced

    # One that someone has put elsewhere (`model.old_forward = model.forward`) is copied as the original: bound to the copy, so
    # that an EMA does not compute with these weights, and without a name of fleetx in the pickle.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        original = self.original()
        if isinstance(original, types.MethodType):
            return getattr, (original.__self__, original.__func__.__name__)  # as a method pickles itself
        return functools.partial, (original,)


def patch_in(forward: Any) -> PatchedForward | None:
    """Return the patch that a value of `module.__dict__["forward"]` calls; None where it is none of ours."""
    found = getattr(forward, STAND_IN, None) if type(forward) is types.FunctionType else None
    return found if isinstance(found, PatchedForward) else None


def patch_of(module: nn.Module) -> PatchedForward | None:
    """Return the outermost patch of the module's forward, if it has one."""
    return patch_in(vars(module).get("forward"))


_codes: weakref.WeakKeyDictionary[type, types.CodeType] = weakref.WeakKeyDictionary()


def _code_for(kind: type, template: types.CodeType) -> types.CodeType:
    if kind not in _codes:
        _codes[kind] = template.replace(co_name="forward")
    return _codes[kind]


def restore_forwards(model: nn.Module) -> None:
    """Take back every patch: those of a pair that is gone would go on acting in the next one."""
    for module in model.modules():
        patch = patch_of(module)
        if patch is not None:
            del module.__dict__["forward"]
            if patch.replaced() is not ABSENT:
                module.forward = patch.replaced()


def patch_forward(
    module: nn.Module, around: Callable[..., Any], *, only_outermost: bool = False, is_of_the_whole: bool = False
) -> None:
    """Call `around(forward, *args, **kwargs)` wherever the module's forward was called."""
    patch = PatchedForward(module, around, only_outermost=only_outermost, is_of_the_whole=is_of_the_whole)
    module.forward = patch.as_function()
    keep_copies_plain(module)


def patch_innermost(module: nn.Module, around: Callable[..., Any], *, only_outermost: bool = False) -> None:
    """Patch inside of patches that are there already: for one that does what forward does in another way."""
    outer = patch_of(module)
    if outer is None:
        return patch_forward(module, around, only_outermost=only_outermost)
    while isinstance(outer.inner, PatchedForward):
        outer = outer.inner
    own = PatchedForward(module, around, only_outermost=only_outermost)
    own.inner, outer.inner = outer.inner, own


@contextlib.contextmanager
def patched(patches: Iterable[tuple[nn.Module, Callable[..., Any]]], *, only_outermost: bool = False) -> Iterator[None]:
    """Patch as patch_forward does, for a while."""
    before: list[tuple[nn.Module, Forward | None]] = []
    try:
        for module, around in patches:
            before.append((module, module.__dict__.get("forward")))
            patch_forward(module, around, only_outermost=only_outermost)
        yield
    finally:
        for module, forward in reversed(before):
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward
