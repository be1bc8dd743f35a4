"""Steps that are measured and undone: whether one is under way, and how the engine runs its backward and its update.

What would talk to other ranks, or take note of data, asks `is_on()` first. The flag is not a thread's own, since a GPU's
backward runs in another thread. What a dry step has changed is put back by dry_run.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from .window import Window

if TYPE_CHECKING:
    from .step import Pipeline

_depth = 0


def is_on() -> bool:
    return _depth > 0


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def backward(pipeline: Pipeline, loss: Tensor, *, seed: float | None = None, keeps: bool = False) -> None:
    """Run a backward whose gradients come to lie where they always do, and drop them unless `keeps`. No rank is talked to."""
    pipeline.buckets.begin()
    pipeline.window.enter(loss, None)
    pipeline.buckets.expect(reduces=False)
    try:
        pipeline.run_backward(loss, pipeline.weighing.seed(None) if seed is None else seed, retain_graph=False)
        pipeline.buckets.keep()
    finally:
        if not keeps:
            drop_gradients(pipeline)


def update(pipeline: Pipeline) -> None:
    """Reduce and apply what `backward` has kept. Every rank is here; none looks at data, of which there was none yet."""
    look, pipeline.checks.first_look = pipeline.checks.first_look, None
    weighted = pipeline.weighing.weighted
    pipeline.compares_ranks = False
    try:
        pipeline.reduce_now()
        pipeline.update(recycle=True)
    finally:
        pipeline.checks.first_look, pipeline.weighing.weighted = look, weighted
        pipeline.compares_ranks = True


def drop_gradients(pipeline: Pipeline) -> None:
    """Drop the gradients and the window under way."""
    pipeline.buckets.abandon()
    pipeline.window = Window()
    pipeline.buckets.zero()


def look_at_no_data(pipeline: Pipeline) -> None:
    """Leave out the check of the first batch: real updates of a sample follow, which may well be the same on all ranks."""
    if pipeline.checks.first_look is not None:
        pipeline.checks.first_look.give_up()
        pipeline.checks.first_look = None
