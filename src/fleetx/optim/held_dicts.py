"""Load an optimizer's state into the very dicts it has: a scheduler made before holds them, and must go on to move them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def load_in_place(optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """`load` is torch's own, which puts new dicts in their place."""
    groups, state = optimizer.param_groups, optimizer.state
    load(state_dict)
    for group, new in zip(groups, optimizer.param_groups, strict=True):
        group.update(new)
    state.clear()
    state.update(optimizer.state)
    optimizer.param_groups, optimizer.state = groups, state
