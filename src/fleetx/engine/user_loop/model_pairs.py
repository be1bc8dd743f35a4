"""The pairs of model and optimizer that live side by side, and which of them a backward belongs to."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer

from ...dist import world
from ...errors import ConfigError

# --- Backwards inside a backward, as re-entrant checkpointing runs them, and the number of the outermost ------------
# torch.utils.checkpoint.checkpoint(..., use_reentrant=True) computes a segment again inside its own backward, and runs a backward
# of it there. Autograd numbers each of them, and calls back at the end of the inner one, when the outer one is still under way. A
# parameter that two segments share gets a gradient from each, so buckets cannot tell by counting when they are complete.


_outermost: list[int] = []
"""Numbers of the backwards that are waiting for a re-entrant segment, outermost first."""
reentrant_was_used = False
"""A segment was checkpointed this way since this process joined its group."""


def current_task() -> int:
    """Autograd's number of the outermost backward under way; -1 outside of any."""
    return _outermost[0] if _outermost else int(torch._C._current_graph_task_id())


def is_inside_segment() -> bool:
    return bool(_outermost)


def is_inside_function() -> bool:
    """Return whether a custom autograd function's backward is on the call stack: a backward that it runs is an inner one."""
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
        global reentrant_was_used
        reentrant_was_used = True
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


# --------------------------------------------------------------------------------------------------------------------


# --- Which leaf tensors a loss reaches --------------------------------------------------------------------------------


def leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose `.grad` a backward of `loss` would write, found by walking its graph."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    found: list[Tensor] = []
    seen: set[Any] = {loss.grad_fn}
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        for successor, _ in node.next_functions:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
    return found


# ----------------------------------------------------------------------------------------------------------------------


class Pair(Protocol):
    param_ids: set[int]

    @property
    def averages(self) -> bool:
        """Its weights may differ from rank to rank, now or later in the run."""

    def end_bare(self, *, shared: bool) -> None:
        """Finish a bare backward. `shared`: it reached other pairs too."""

    def abandon_bare(self) -> None:
        """Drop a bare backward that failed."""

    def end(self, why: str) -> None:
        """Train nothing any more."""

    def refuse_unreduced(self, optimizer: Optimizer) -> None:
        """Raise where this optimizer steps parameters of the model that no pair trains."""

    def before_other_step(self, optimizer: Optimizer) -> None:
        """Refuse or reduce: an optimizer that is not this pair's is about to step some of its parameters."""

    def reduce_before_scaler(self, optimizer: Optimizer) -> None:
        """Reduce gradients that are this rank's own before a GradScaler looks at them, for a step of this optimizer."""


alive: weakref.WeakSet[Pair] = weakref.WeakSet()
"""Pairs that have not ended."""
_numbers: weakref.WeakKeyDictionary[Pair, int] = weakref.WeakKeyDictionary()
_count = 0
_reached: dict[int, list[Pair]] = {}
"""Pairs that a bare backward has reached so far, by the backward's number."""


def enlist(pair: Pair) -> None:
    global _count
    _count += 1
    alive.add(pair)
    _numbers[pair] = _count
    watch(finish_backward)


def dismiss(pair: Pair) -> None:
    """Forget a pair that trains nothing any more, even if a reference to it is left."""
    alive.discard(pair)


def forget() -> None:
    """Forget all pairs, with the world they were distributed in."""
    global reentrant_was_used
    reentrant_was_used = False
    alive.clear()
    _reached.clear()


def owner_of(param: Tensor) -> Pair | None:
    """Return the pair that trains this parameter. A discarded pair owns nothing."""
    return next((pair for pair in alive if id(param) in pair.param_ids), None)


def reached_by(optimizer: Optimizer) -> list[Pair]:
    """Return the pairs that have parameters which this optimizer steps, in the order of their making."""
    reached = [
        pair
        for pair in alive
        if any(id(param) in pair.param_ids for group in optimizer.param_groups for param in group["params"])
    ]
    return sorted(reached, key=lambda pair: _numbers[pair])


def refuse_unreduced(optimizer: Optimizer) -> None:
    for pair in list(alive):
        pair.refuse_unreduced(optimizer)


def trained_by_others(own: set[int]) -> set[int]:
    """Return the parameters, by id, of the pairs that train none of these."""
    return {param for pair in alive if own.isdisjoint(pair.param_ids) for param in pair.param_ids}


def end_owners(params: Iterable[Tensor], why: str) -> None:
    """End every pair that trains one of these parameters."""
    ids = {id(param) for param in params}
    for pair in [pair for pair in alive if ids & pair.param_ids]:
        pair.end(why)


def is_alive(pair: Pair) -> bool:
    """Return whether the pair trains: it has not ended."""
    return pair in alive


def is_only_one() -> bool:
    return len(alive) == 1


def drop_discarded() -> None:
    """Collect pairs to which only their own cycles refer: beside another pair no reduce starts before backward ends."""
    if alive:
        gc.collect()


# --- a bare backward ------------------------------------------------------------------------------------------------


def join_backward(pair: Pair, task: int) -> None:
    """Have `pair.end_bare` called at the end of this backward."""
    if task in _reached:
        _reached[task].append(pair)
        return
    for others in _reached.values():  # of a backward that failed: its end never came
        for other in others:
            if other is not pair:
                other.abandon_bare()
    _reached.clear()
    _reached[task] = [pair]
    if not is_inside_segment():  # else the outermost backward was asked when the segment began
        queue_callback(finish_backward)


def finish_backward() -> None:
    """Let each pair that this backward has reached reduce.

    In the order of their making: a GAN's generator loss reaches both pairs, and which gradient comes first may differ from rank
    to rank. If rank 0 reduced the generator first and rank 1 the discriminator, both would wait for ever."""
    pairs = _reached.pop(current_task(), [])
    for done, pair in enumerate(sorted(pairs, key=lambda pair: _numbers[pair])):
        try:
            pair.end_bare(shared=len(pairs) > 1)
        except BaseException:
            for other in sorted(pairs, key=lambda pair: _numbers[pair])[done + 1 :]:
                other.abandon_bare()
            raise


def backward_of_one(pair: Pair, loss: Tensor, gradient: Tensor | None, *, retain_graph: bool) -> None:
    """Run a backward that leaves other pairs alone: a GAN's generator loss runs through the discriminator, whose gradients and
    window are not ours to touch."""
    others = {i for other in alive if other is not pair for i in other.param_ids}
    inputs = [leaf for leaf in leaves(loss) if id(leaf) not in others]
    if not inputs:
        raise ConfigError("this loss depends on no parameter of this optimizer's model, only on another pair's.")
    loss.backward(gradient, retain_graph=retain_graph, inputs=inputs)


world.at_close(forget)
