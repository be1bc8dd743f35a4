"""Hooks of ours before an optimizer's step: they refuse, or do nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.optim import Optimizer

MARK = "_fleetx_only_refuses"
Refusal = TypeVar("Refusal", bound=Callable[..., None])


def only_refuses(hook: Refusal) -> Refusal:
    """Mark a hook that changes no gradient."""
    setattr(hook, MARK, True)
    return hook


def refuse_before_step(optimizer: Optimizer, refuse: Callable[..., None]) -> None:
    """`refuse(optimizer, *_)` before every step; registered once."""
    only_refuses(refuse)
    if refuse not in optimizer._optimizer_step_pre_hooks.values():
        optimizer.register_step_pre_hook(refuse)


def may_change_gradients(hooks: Mapping[int, Any]) -> bool:
    """Whether somebody else's are among them."""
    return any(not hasattr(hook, MARK) for hook in hooks.values())
