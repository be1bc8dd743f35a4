"""The pairs of model and optimizer that this process has distributed, in order: what a monitor writes down of a run."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from ...dist import world
from ..user_loop.ddp import bare

if TYPE_CHECKING:
    from ...strategy import DistributedStrategy
    from ..optimizer import FleetOptimizer


@dataclass(frozen=True)
class Pair:
    number: int
    """Number of the pair, from 1."""
    model: weakref.ref[nn.Module]
    optimizer_name: str
    model_name: str
    parameters: int
    strategy: DistributedStrategy
    is_wrapped: bool
    """In DDP, which reduces inside backward."""
    face: weakref.ref[FleetOptimizer]


_pairs: list[Pair] = []


def enlist(model: nn.Module, face: FleetOptimizer, strategy: DistributedStrategy) -> None:
    inner = face.update
    number = face.pipeline.report_builder.pair = len(_pairs) + 1
    count, name, is_wrapped = sum(p.numel() for p in model.parameters()), type(bare(model)).__name__, bare(model) is not model
    pair = Pair(number, weakref.ref(model), type(inner).__name__, name, count, strategy.copy(), is_wrapped, weakref.ref(face))
    _pairs.append(pair)


def note_strategy(face: FleetOptimizer, strategy: DistributedStrategy) -> None:
    """Write down that a pair goes on with another strategy."""
    number = face.pipeline.report_builder.pair
    _pairs[:] = [replace(pair, strategy=strategy.copy()) if pair.number == number else pair for pair in _pairs]


def count() -> int:
    return len(_pairs)


def pairs() -> tuple[Pair, ...]:
    """Return the pairs whose model is still alive: a notebook's cell that is run again has made others before."""
    return tuple(pair for pair in _pairs if pair.model() is not None)


def forget() -> None:
    """Forget all pairs, with the world they were distributed in."""
    _pairs.clear()


world.at_close(forget)
