"""Backwards inside a backward, as re-entrant checkpointing runs them, and the number of the outermost.

torch.utils.checkpoint.checkpoint(..., use_reentrant=True) computes a segment again inside its own backward, and runs a backward
of it there. Autograd numbers each of them, and calls back at the end of the inner one, when the outer one is still under way. A
parameter that two segments share gets a gradient from each, so buckets cannot tell by counting when they are complete.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ..dist import world

_outermost: list[int] = []
"""Numbers of the backwards that are waiting for a re-entrant segment, outermost first."""
_was_used = False


def current_task() -> int:
    """Autograd's number of the outermost backward under way; -1 outside of any."""
    return _outermost[0] if _outermost else int(torch._C._current_graph_task_id())


def was_used() -> bool:
    """Whether a segment was checkpointed this way since this process joined its group."""
    return _was_used


def forget() -> None:
    global _was_used
    _was_used = False


def is_inside_segment() -> bool:
    return bool(_outermost)


def is_inside_function() -> bool:
    """Whether a custom autograd function's backward is on the call stack: a backward that it runs is an inner one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


@functools.cache
def watch(at_end: Callable[[], None]) -> None:
    """Note every use of re-entrant checkpointing from now on; `at_end` is called when the outermost backward is over."""
    from torch.utils.checkpoint import CheckpointFunction

    forward, backward = CheckpointFunction.forward, CheckpointFunction.backward

    @functools.wraps(forward)
    def noted_forward(*args: Any) -> Any:
        global _was_used
        _was_used = True
        return forward(*args)  # type: ignore[no-untyped-call]

    @functools.wraps(backward)
    def noted_backward(*args: Any) -> Any:
        if not _outermost:  # here the outermost backward is the current one, which takes a callback; inside it is not
            queue_callback(at_end)
        _outermost.append(int(torch._C._current_graph_task_id()))
        try:
            return backward(*args)  # type: ignore[no-untyped-call]
        finally:
            _outermost.pop()

    CheckpointFunction.forward = staticmethod(noted_forward)  # type: ignore[method-assign]
    CheckpointFunction.backward = staticmethod(noted_backward)  # type: ignore[method-assign]


def queue_callback(action: Callable[[], None]) -> None:
    """Run `action` when the current backward has computed all gradients, before its caller goes on."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


world.at_close(forget)
