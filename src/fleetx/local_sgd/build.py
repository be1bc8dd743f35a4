"""Build the stages of a step from the settings that localsgd and adaptive_localsgd share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, final

import torch

from ..dist.comm import Comm, Pending
from ..engine.bucket import Bucket
from ..engine.dense_reduce import DenseAllReduce, KeepsNothing
from ..engine.slots import Site, Slot, Step
from ..errors import ConfigError
from .engine import Averaging, Wire
from .outer import OuterRule
from .period import Period


@final
class DenseAtFirst(KeepsNothing):
    """REDUCE under Local SGD: dense until the averaging begins; afterwards each rank keeps its own gradients."""

    carries_tail = True

    def __init__(self, comm: Comm, averaging: Averaging) -> None:
        self._dense, self._averaging = DenseAllReduce(comm), averaging

    def is_local(self) -> bool:
        return self._averaging.begun

    def start(self, bucket: Bucket, step: Step) -> Pending:
        return Pending(None) if self.is_local() else self._dense.start(bucket, step)


class Settings(Protocol):
    """The settings that both strategies have, read only."""

    @property
    def name(self) -> str: ...
    @property
    def begin_step(self) -> int: ...
    @property
    def outer_lr(self) -> float: ...
    @property
    def outer_momentum(self) -> float: ...
    @property
    def outer_nesterov(self) -> bool: ...
    @property
    def average_state(self) -> bool: ...
    @property
    def wire_dtype(self) -> str: ...
    @property
    def overlap_steps(self) -> int: ...
    @property
    def across_nodes_every(self) -> int: ...


def require_fit(part: Settings, *, longest_period: int, key: str) -> None:
    """Refuse settings that contradict each other."""
    if part.overlap_steps > longest_period:
        raise ConfigError(
            f'{part.name}_configs["overlap_steps"] is {part.overlap_steps}, and a new averaging begins after at most '
            f"{longest_period} updates ({key}). Write at most {longest_period}."
        )
    if part.outer_nesterov and part.outer_momentum == 0:
        raise ConfigError(
            f"{part.name}: outer_nesterov is a form of outer_momentum, which is 0. Write an outer_momentum, such as 0.9."
        )
    if part.average_state and part.overlap_steps:
        raise ConfigError(
            f"{part.name}: average_state with overlap_steps {part.overlap_steps} would put moments of earlier weights on top of "
            "later updates, and a second moment may then fall below 0. Write average_state=False, or overlap_steps=0."
        )


def nothing_saved(part: Settings, *, longest_period: int, key: str, write: int) -> str | None:
    """Return a sentence if every update is averaged over all ranks and no other setting is used; else None."""
    is_plain = (part.outer_lr, part.outer_momentum, part.wire_dtype) == (1.0, 0.0, "float32")
    if longest_period > 1 or not is_plain or part.across_nodes_every > 1 or part.overlap_steps:
        return None
    # Not "no effect": with Adam each rank keeps its own moments, so the weights differ from synchronous training.
    return (
        f"{part.name} saves nothing with {key} = 1: weights are averaged after every update. "
        f'Write strategy.{part.name}_configs = {{"{key}": {write}}}.'
    )


def averaging_stages(part: Settings, site: Site, period: Period) -> Mapping[Slot, Any]:
    """Build the stages for REDUCE and AVERAGE."""
    averaging = Averaging(
        site,
        begin_step=part.begin_step,
        period=period,
        rule=OuterRule(part.outer_lr, part.outer_momentum, part.outer_nesterov),
        wire=Wire(getattr(torch, part.wire_dtype), part.overlap_steps, part.across_nodes_every),
        average_state=part.average_state,
    )
    return {Slot.REDUCE: DenseAtFirst(site.comm, averaging), Slot.AVERAGE: averaging}
