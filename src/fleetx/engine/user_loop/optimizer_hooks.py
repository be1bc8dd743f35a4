"""Hooks of ours before an optimizer's step: they refuse, or do nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Protocol, TypeVar

from torch.optim import Optimizer

MARK = "_fleetx_only_refuses"
Refusal = TypeVar("Refusal", bound=Callable[..., None])


def only_refuses(hook: Refusal) -> Refusal:
    """Mark a hook that changes no gradient."""
    setattr(hook, MARK, True)
    return hook


def refuse_before_step(optimizer: Optimizer, refuse: Callable[..., None]) -> None:
    """Call `refuse(optimizer, *_)` before every step; registered once."""
    only_refuses(refuse)
    if refuse not in optimizer._optimizer_step_pre_hooks.values():
        optimizer.register_step_pre_hook(refuse)


def may_change_gradients(hooks: Mapping[int, Any]) -> bool:
    """Return whether hooks of others are among them."""
    return any(not hasattr(hook, MARK) for hook in hooks.values())


# Calls of the optimizer that was given to fleet.distribute go to the pair: a script that goes on with it trains all the same.
# model, _ = fleet.distribute(model, optimizer)        # the result is not used, or a scheduler or framework holds the first one
# loss.backward()
# optimizer.step()                                     # the pair's step: checks, clipping, update, averaging

METHODS = ("step", "zero_grad", "add_param_group", "load_state_dict")
BEFORE = "_fleetx_before"
"""On a method of ours: the one of the instance that it has taken the place of, or None."""


_OURS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""Our own wrappers, by identity: a scheduler's wrapper around one of ours copies its attributes."""


class Target(Protocol):
    """The optimizer that fleet.distribute has returned."""

    def takes_calls(self) -> bool:
        """Return whether calls of the given optimizer are for the pair: it has not ended, and is not making one of them
        itself."""


def route(given: Optimizer, target: Target) -> None:
    """Send the calls of `METHODS` to the target, as long as it takes them. The class and its own methods stay untouched.

    The given optimizer holds the target: where the script keeps only the given one, that one keeps the pair alive."""
    for name in METHODS:
        # A method, and not a function: a scheduler that is made later looks for the function inside of it.
        given.__dict__[name] = MethodType(_routed(name, given.__dict__.get(name), target), given)


def stop_routing(given: Optimizer) -> None:
    """Give the optimizer its own methods back; under a scheduler's wrapper ours stay, and pass every call on."""
    for name in METHODS:
        method = given.__dict__.get(name)
        if getattr(method, "__func__", None) in _OURS:
            before = getattr(method, BEFORE)
            del given.__dict__[name]
            if before is not None:
                given.__dict__[name] = before


def _routed(name: str, before: Callable[..., Any] | None, target: Target) -> Callable[..., Any]:
    def call(self: Optimizer, *args: Any, **settings: Any) -> Any:
        if target.takes_calls():
            return getattr(target, name)(*args, **settings)
        own = before if before is not None else getattr(type(self), name).__get__(self)
        return own(*args, **settings)

    setattr(call, BEFORE, before)
    _OURS.add(call)
    if hasattr(before, "_wrapped_by_lr_sched"):
        call._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else the scheduler warns that step() was replaced
    return call
