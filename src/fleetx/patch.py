"""Change a module's forward in place, so that class, names and state dict stay the user's and copies stay plain."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from torch import nn

Forward = Callable[..., Any]


@final
class PatchedForward:
    """Stands in `module.__dict__["forward"]`. A copy of the module (deepcopy, pickle) gets the original forward, its own."""

    def __init__(
        self, module: nn.Module, around: Callable[..., Any], *, only_outermost: bool, is_of_the_whole: bool = False
    ) -> None:
        self.module = module
        self.inner: Forward = module.forward
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

    def __reduce__(self) -> tuple[Any, ...]:
        # An instance attribute bound to this module would make an EMA copy compute with these weights.
        # deepcopy maps `self.module` to the copy being made, and so binds the class's own function to it.
        original = self.original()
        if isinstance(original, types.MethodType) and original.__self__ is self.module:
            return _bound, (original.__func__, self.module)
        return _same, (original,)


def _bound(function: Callable[..., Any], module: nn.Module) -> Forward:
    return types.MethodType(function, module)


def _same(value: Forward) -> Forward:
    return value


def restore_forwards(model: nn.Module) -> None:
    """Take back every patch: those of a pair that is gone would go on acting in the next one."""
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if isinstance(patched, PatchedForward):
            original = patched.original()
            del module.__dict__["forward"]
            if not (isinstance(original, types.MethodType) and original.__self__ is module):
                module.forward = original


def patch_forward(
    module: nn.Module, around: Callable[..., Any], *, only_outermost: bool = False, is_of_the_whole: bool = False
) -> None:
    """Call `around(forward, *args, **kwargs)` wherever the module's forward was called."""
    module.forward = PatchedForward(module, around, only_outermost=only_outermost, is_of_the_whole=is_of_the_whole)


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
