"""The optimizer that prepare() returns: Accelerate's wrapper around the one that drives the strategy, and how it ends."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import nn

from fleetx import fleet
from fleetx.dist import world
from fleetx.engine.bind import give_up
from fleetx.engine.optimizer import FleetOptimizer
from fleetx.engine.report import Report
from fleetx.errors import ConfigError, FleetError
from fleetx.integrations import imported
from fleetx.strategy import DistributedStrategy

from ..engine.dry_steps import drop_gradients

# --- Accelerate's settings as a strategy's, and the variables by which Accelerate knows a rank ------------------------

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
HANDLERS = {
    "DistributedDataParallelKwargs": "there is no DDP here: strategy.find_unused_parameters, strategy.fuse_grad_size_in_MB",
    "GradScalerKwargs": "strategy.amp_configs has the loss scale",
    "AutocastKwargs": "strategy.amp_configs has the precision",
}


def copied(strategy: DistributedStrategy | None) -> DistributedStrategy:
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f"strategy is {type(strategy).__name__}; it must be a fleet.DistributedStrategy.")
    return fleet._chosen(strategy)


def merged(strategy: DistributedStrategy, window: int, *, said: str) -> DistributedStrategy:
    """A copy that merges `window` micro-batches. Their losses come divided already, so gradients are summed."""
    strategy = strategy.copy()
    if window > 1:
        if strategy.gradient_merge:
            raise ConfigError(
                f"{said}={window} and strategy.gradient_merge both say how many micro-batches make one update. Keep one of them."
            )
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": window, "avg": False}
    return strategy


def with_precision(strategy: DistributedStrategy, precision: str | None) -> DistributedStrategy:
    """A copy that has Accelerate's mixed precision as its own."""
    strategy = strategy.copy()
    if precision in (None, "no"):
        return strategy
    if precision not in DTYPES:
        raise ConfigError(f'mixed_precision="{precision}" is not supported; "no", "bf16" and "fp16" are.')
    if strategy.amp:
        raise ConfigError(f'mixed_precision="{precision}" and strategy.amp both set the precision. Keep one of them.')
    strategy.amp = True
    strategy.amp_configs = {"dtype": DTYPES[precision]}
    return strategy


@contextlib.contextmanager
def world_shown(variables: MutableMapping[str, str]) -> Iterator[None]:
    """Accelerate knows ranks by these variables alone; a group made from Slurm's or MPI's it would not see."""
    here = world.current()
    host = here.endpoints[here.comm.rank].rpartition(":")[0]
    neighbours = sum(endpoint.rpartition(":")[0] == host for endpoint in here.endpoints)
    told = {"RANK": here.comm.rank, "WORLD_SIZE": here.comm.size, "LOCAL_RANK": here.local_rank, "LOCAL_WORLD_SIZE": neighbours}
    added = [name for name in told if name not in variables and here.comm.size > 1]
    variables.update({name: str(told[name]) for name in added})
    try:
        yield
    finally:  # a process started from here would take itself for this rank
        for name in added:
            variables.pop(name, None)


def refuse_handlers(handlers: Iterable[Any]) -> None:
    for handler in handlers:
        name = type(handler).__name__
        if name in HANDLERS:
            raise ConfigError(f"kwargs_handlers holds {name}, which nothing would follow: {HANDLERS[name]}. Leave it out.")


# ----------------------------------------------------------------------------------------------------------------------

accelerate: Any = imported("accelerate", extra="hf", oldest=(1, 0))
PlainOptimizer: Any = accelerate.optimizer.AcceleratedOptimizer

FREED = (
    "this optimizer was released by accelerator.free_memory(), clear() or release(). "
    "Give accelerator.prepare(model, optimizer) a new torch optimizer; a FleetTrainer is made anew."
)
TAKEN = (
    "this optimizer's parameters were prepared once more, by another Accelerator or FleetTrainer, which trains them now. "
    "Go on with that one, or make a new one on the same model."
)


class FleetAcceleratedOptimizer(PlainOptimizer):  # type: ignore[misc]
    """What prepare() returns: Accelerate's wrapper, around the optimizer that drives the strategy (`.optimizer`)."""

    def __init__(self, optimizer: FleetOptimizer, model: nn.Module, *, hosted: bool) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.model, self._hosted = model, hosted
        """`hosted`: Accelerate says where a window ends."""
        self.report: Report | None = None
        self.released: str | None = None
        """Why it trains nothing any more."""
        living.add(self)

    def release(self, because: str) -> None:
        """The model is as the user wrote it again, and its parameters are free for another optimizer."""
        if self.released is None:
            self.released = because
            if not self.optimizer.ended:
                give_up(self.model, self.optimizer)
            self.optimizer.forward_stage = None  # fleet.autocast() would go on as long as somebody holds this one

    def refuse_released(self) -> None:
        if self.released is not None:
            raise ConfigError(self.released)

    @property
    def shows_own_weights(self) -> bool:
        """Local SGD, outside of `with optimizer.averaged():`."""
        pipeline = self.optimizer.pipeline
        try:
            pipeline.refuse_inside_averaged()
        except FleetError:
            return False
        return bool(pipeline.averages)

    def drop_half_window(self) -> None:
        """Of a loop that was left inside a window: its framework makes no update of it."""
        pipeline = self.optimizer.pipeline
        if pipeline.window.micro_steps:
            drop_gradients(pipeline)

    def end_with_average(self) -> None:
        """Every rank calls it. No round right after one: DiLoCo's momentum would move the weights once more."""
        pipeline = self.optimizer.pipeline
        stage, report = pipeline.stages.average, self.report
        if stage is not None and not (report is not None and report.averaged and stage.keeps_ranks_equal):
            self.optimizer.average()

    def step(self, closure: Any = None) -> Report | None:
        self.refuse_released()
        face: FleetOptimizer = self.optimizer
        if not self.gradient_state.sync_gradients:
            if face.pipeline.window.entered or face.pipeline.buckets.has_new():
                face.step()  # ends the micro-step: nothing moves inside a window
            self._is_overflow = True  # no update: a scheduler must not move
            return None
        if closure is not None:
            raise ConfigError(
                "step(closure) under Accelerate, which says itself where an update ends. Call accelerator.backward(loss)."
            )
        report = face.step()
        if self._hosted and not report.due:
            report = face.flush()  # after a bare loss.backward(), the last of a short window
        # Ranks that train alone may skip alone: their schedulers must move alike. Else as Accelerate does: not on an overflow.
        self._is_overflow = not report.due or (report.skipped and not face.pipeline.trains_alone)
        self.report = report
        return report

    def __getattr__(self, name: str) -> Any:
        """`backward`, `minimize`, `flush`, `average`, `averaged`, `due`, ...: of the optimizer inside."""
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.__dict__["optimizer"], name)


living: weakref.WeakSet[FleetAcceleratedOptimizer] = weakref.WeakSet()
"""Whoever made them: one that is done with may wait for the garbage collector, or stay in a variable."""
