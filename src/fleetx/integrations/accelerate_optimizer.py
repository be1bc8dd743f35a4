"""The optimizer that prepare() returns: Accelerate's wrapper around the one that drives the strategy, and how it ends."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from fleetx.engine.bind import give_up
from fleetx.engine.optimizer import FleetOptimizer
from fleetx.engine.report import Report
from fleetx.errors import ConfigError, FleetError
from fleetx.integrations import imported

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
            pipeline.drop_rehearsed()

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
