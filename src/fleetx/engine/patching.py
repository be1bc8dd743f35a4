"""Change a module's forward in place, so that class, names and state dict stay the user's and copies stay plain."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, final

from torch import nn

from .plain_copy import ABSENT, StandIn, keep_copies_plain

# --- Which patches of a forward this thread is inside of: one that acts on the outermost call alone asks --------------

_who: ContextVar[frozenset[int]] = ContextVar("who", default=frozenset())


def inside() -> frozenset[int]:
    """Return the ids of these patches. Code that runs a part of a forward later, or in another thread, takes them along."""
    return _who.get()


@contextlib.contextmanager
def as_inside(who: frozenset[int]) -> Iterator[None]:
    before = _who.set(who)
    try:
        yield
    finally:
        _who.reset(before)


# ----------------------------------------------------------------------------------------------------------------------

Forward = Callable[..., Any]


@final
class PatchedForward(StandIn):
    """Stands in `module.__dict__["forward"]`. A copy of the module (deepcopy, pickle) has what stood there before."""

    place = "forward"

    def __init__(
        self, module: nn.Module, around: Callable[..., Any], *, only_outermost: bool, is_of_the_whole: bool = False
    ) -> None:
        self.module = module
        self.inner: Forward = module.forward
        before = module.__dict__.get("forward", ABSENT)
        self._replaced = before.replaced() if isinstance(before, PatchedForward) else before
        self.around = around
        self._only_outermost, self._is_of_the_whole = only_outermost, is_of_the_whole
        functools.update_wrapper(self, self.inner, updated=())  # the signature stays readable: Hugging Face asks for it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.inner, *args, **kwargs)

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
        """The forward before any patch."""
        inner = self.inner
        while isinstance(inner, PatchedForward):
            inner = inner.inner
        return inner

    def replaced(self) -> Any:
        """The forward that the user had set on this very module, or ABSENT: then the class's serves."""
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


def restore_forwards(model: nn.Module) -> None:
    """Take back every patch: those of a pair that is gone would go on acting in the next one."""
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if isinstance(patched, PatchedForward):
            del module.__dict__["forward"]
            if patched.replaced() is not ABSENT:
                module.forward = patched.replaced()


def patch_forward(
    module: nn.Module, around: Callable[..., Any], *, only_outermost: bool = False, is_of_the_whole: bool = False
) -> None:
    """Call `around(forward, *args, **kwargs)` wherever the module's forward was called."""
    module.forward = PatchedForward(module, around, only_outermost=only_outermost, is_of_the_whole=is_of_the_whole)
    keep_copies_plain(module)


def patch_innermost(module: nn.Module, around: Callable[..., Any]) -> None:
    """The same, inside of patches that are there already: for one that does what forward does in another way."""
    outer = module.__dict__.get("forward")
    if not isinstance(outer, PatchedForward):
        return patch_forward(module, around)
    while isinstance(outer.inner, PatchedForward):
        outer = outer.inner
    own = PatchedForward(module, around, only_outermost=False)
    own.inner, outer.inner = outer.inner, own


@contextlib.contextmanager
def patched(patches: Iterable[tuple[nn.Module, Callable[..., Any]]], *, only_outermost: bool = False) -> Iterator[None]:
    """As patch_forward, for a while."""
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
