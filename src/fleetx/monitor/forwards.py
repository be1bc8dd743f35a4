"""Hooks that record when a model's forward begins and ends, to separate it from data loading while a monitor is open.

From a training forward until backward the phase is FORWARD, which includes the loss; after an evaluation forward it is SCRIPT.
A model compiled in place (`model.compile()`) runs no hooks: its forward counts as data loading.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..dist import heartbeat
from ..dist.heartbeat import Phase
from ..engine.modules.plain_copy import keep_copies_plain, left_out

OUTSIDE = (Phase.SCRIPT, Phase.FORWARD, Phase.EVALUATE)
"""Phases in which a hook may change the phase. Recompute runs forwards inside BACKWARD, which are part of it."""
_evaluating: nn.Module | None = None
"""Outermost module of the current evaluation forward; None outside one."""


@left_out
def before_forward(module: nn.Module, *_: Any) -> None:
    global _evaluating
    if torch.compiler.is_compiling():
        return
    phase = heartbeat.now()
    if phase not in OUTSIDE or _evaluating is not None:
        return
    trains = module.training and torch.is_grad_enabled()
    if trains and phase is Phase.FORWARD:
        return
    _evaluating = None if trains else module
    heartbeat.enter(Phase.FORWARD if trains else Phase.EVALUATE)


@left_out
def after_forward(module: nn.Module, *_: Any) -> None:
    global _evaluating
    if torch.compiler.is_compiling():
        return
    if module is _evaluating:
        _evaluating = None
        heartbeat.enter(Phase.SCRIPT)


def unwatch(handles: Iterable[RemovableHandle]) -> None:
    """Remove the hooks."""
    global _evaluating
    for handle in handles:
        handle.remove()
    _evaluating = None


def watch(model: nn.Module) -> list[RemovableHandle]:
    """Hook the model and its children: a method such as `model.loss(batch)` may call only the children."""
    handles = []
    for module in unique([model, *model.children()]):
        keep_copies_plain(module)
        handles += [
            module.register_forward_pre_hook(before_forward),
            module.register_forward_hook(after_forward, always_call=True),
        ]
    return handles


def unique(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(modules))
