"""Wrap the strategy's optimizer for Accelerate, and translate Accelerate's settings into the strategy's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Literal

from torch import nn

from .. import fleet
from ..dist import world
from ..engine.dry_steps import drop_gradients
from ..engine.optimizer import FleetOptimizer
from ..engine.report import Report
from ..engine.setup.bind import give_up
from ..errors import ConfigError, FleetError
from ..strategy import DistributedStrategy
from . import require_package

# --- Accelerate's settings as a strategy's, and the variables by which Accelerate knows a rank ------------------------

DTYPES: dict[str, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}
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
    """Return a copy that merges `window` micro-batches. Their losses are divided already, so gradients are summed."""
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
    """Return a copy with Accelerate's mixed precision as strategy.amp."""
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
    """Set the variables by which Accelerate finds its rank; it does not see a group made from Slurm's or MPI's."""
    here = world.current()
    host = here.endpoints[here.comm.rank].rpartition(":")[0]
    neighbours = sum(endpoint.rpartition(":")[0] == host for endpoint in here.endpoints)
    values = {"RANK": here.comm.rank, "WORLD_SIZE": here.comm.size, "LOCAL_RANK": here.local_rank, "LOCAL_WORLD_SIZE": neighbours}
    added = [name for name in values if name not in variables and here.comm.size > 1]
    variables.update({name: str(values[name]) for name in added})
    try:
        yield
    finally:  # a process started later would inherit them and take itself for this rank
        for name in added:
            variables.pop(name, None)


def refuse_handlers(handlers: Iterable[Any]) -> None:
    for handler in handlers:
        name = type(handler).__name__
        if name in HANDLERS:
            raise ConfigError(f"kwargs_handlers holds {name}, which would have no effect: {HANDLERS[name]}. Leave it out.")


# --- The optimizer that prepare() returns -----------------------------------------------------------------------------------

accelerate: Any = require_package("accelerate", extra="hf", oldest=(1, 0))
PlainOptimizer: Any = accelerate.optimizer.AcceleratedOptimizer

FREED = (
    "this optimizer was released by accelerator.free_memory(), clear() or release(). "
    "Give accelerator.prepare(model, optimizer) a new torch optimizer, or create a new FleetTrainer."
)
TAKEN = (
    "this optimizer's parameters were prepared again, by another Accelerator or FleetTrainer, which trains them now. "
    "Go on with that one, or make a new one on the same model."
)


class FleetAcceleratedOptimizer(PlainOptimizer):  # type: ignore[misc]
    """Accelerate's wrapper, as prepare() returns it, around the optimizer that runs the strategy (`.optimizer`)."""

    def __init__(self, optimizer: FleetOptimizer, model: nn.Module, *, hosted: bool) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.model, self._hosted = model, hosted
        """`hosted`: Accelerate decides where a window ends."""
        self.report: Report | None = None
        self.released: str | None = None
        """Reason why this optimizer no longer trains anything; None while it does."""
        instances.add(self)

    def release(self, because: str) -> None:
        """Remove the strategy from the model and free its parameters for another optimizer."""
        if self.released is None:
            self.released = because
            if not self.optimizer.ended:
                give_up(self.model, self.optimizer)
            self.optimizer.forward_stage = None  # else fleet.autocast() would act as long as a reference to this one exists

    def refuse_released(self) -> None:
        if self.released is not None:
            raise ConfigError(self.released)

    @property
    def shows_own_weights(self) -> bool:
        """Whether the model holds this rank's own weights: Local SGD, outside of `with optimizer.averaged():`."""
        pipeline = self.optimizer.pipeline
        try:
            pipeline.refuse_inside_averaged()
        except FleetError:
            return False
        return bool(pipeline.averages)

    def drop_half_window(self) -> None:
        """Discard a window that was left half full: the framework makes no update of it."""
        pipeline = self.optimizer.pipeline
        if pipeline.window.micro_steps:
            drop_gradients(pipeline)

    def end_with_average(self) -> None:
        """Average at the end; every rank must call it. Not directly after an averaging: DiLoCo's momentum would move again."""
        pipeline = self.optimizer.pipeline
        stage, report = pipeline.stages.average, self.report
        if stage is not None and not (report is not None and report.averaged and stage.keeps_ranks_equal):
            self.optimizer.average()

    def step(self, closure: Any = None) -> Report | None:
        self.refuse_released()
        fleet_optimizer: FleetOptimizer = self.optimizer
        if not self.gradient_state.sync_gradients:
            if fleet_optimizer.pipeline.window.entered or fleet_optimizer.pipeline.buckets.has_new():
                fleet_optimizer.step()  # ends the micro-step: nothing moves inside a window
            self._is_overflow = True  # no update: a scheduler must not move
            return None
        if closure is not None:
            raise ConfigError(
                "step(closure) under Accelerate, which decides itself where an update ends. Call accelerator.backward(loss)."
            )
        report = fleet_optimizer.step()
        if self._hosted and not report.due:
            report = fleet_optimizer.flush()  # after a bare loss.backward(), the last of a short window
        # Under Local SGD a rank may skip alone, and schedulers must stay equal; else as in Accelerate: no move on an overflow.
        self._is_overflow = not report.due or (report.skipped and not fleet_optimizer.pipeline.trains_alone)
        self.report = report
        return report

    def __getattr__(self, name: str) -> Any:
        """Forward `backward`, `minimize`, `flush`, `average`, `averaged`, `due`, ... to the optimizer inside."""
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.__dict__["optimizer"], name)


instances: weakref.WeakSet[FleetAcceleratedOptimizer] = weakref.WeakSet()
"""All living optimizers, of any accelerator: a finished one may stay in a variable or wait for the garbage collector."""
