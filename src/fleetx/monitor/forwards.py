"""When a model computes: hooks that tell forward from the data before it, while a monitor looks.

From a forward in training until backward the rank is at the loss; after one for evaluation it is back in the script. Inside a
model that was compiled in place (`model.compile()`) nothing is told: its forward counts as data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..dist import heartbeat
from ..dist.heartbeat import Phase
from ..engine.plain_copy import keep_copies_plain, left_out

OUTSIDE = (Phase.SCRIPT, Phase.FORWARD, Phase.EVALUATE)
"""Inside backward a forward may run too: what recompute had dropped."""
_evaluating: nn.Module | None = None
"""The outermost module of an evaluation under way."""


@left_out
def begins(module: nn.Module, *_: Any) -> None:
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
def ends(module: nn.Module, *_: Any) -> None:
    global _evaluating
    if torch.compiler.is_compiling():
        return
    if module is _evaluating:
        _evaluating = None
        heartbeat.enter(Phase.SCRIPT)


def unwatch(handles: Iterable[RemovableHandle]) -> None:
    global _evaluating
    for handle in handles:
        handle.remove()
    _evaluating = None


def watch(model: nn.Module) -> list[RemovableHandle]:
    """The model and its children: a method such as `model.loss(batch)` may call only those."""
    handles = []
    for module in unique([model, *model.children()]):
        keep_copies_plain(module)
        handles += [module.register_forward_pre_hook(begins), module.register_forward_hook(ends, always_call=True)]
    return handles


def unique(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(modules))
