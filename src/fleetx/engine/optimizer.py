"""The face a user sees: a torch optimizer that holds the very groups of the one given, and runs the pipeline."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, final, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigError, did_you_mean
from . import dry_steps
from .report import Report
from .setup.keep_alive import KeptPairs
from .setup.optimizer_swap import STAND_IN, refuse_replaced
from .setup.own_optimizer import Update
from .step import Pipeline
from .user_loop import other_steps
from .user_loop.optimizer_hooks import only_refuses, refuse_before_step, route
from .user_loop.user_grad_scaler import GradScaling, refuse_unfit, scaling_of, unscaled_here

if TYPE_CHECKING:
    from ..auto.plan import Plan
    from ..recompute.plan import MemoryPlan
    from ..strategy import DistributedStrategy


def _as_number(weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"weight is {weight!r}; it must be one number: the tokens or samples of this micro-batch.") from None


OWNER = "_fleetx_owner"

_stepping: list[Optimizer] = []
"""Optimizers that pairs are stepping now."""


@functools.cache
def watch_steps() -> None:
    """Look at every step of every optimizer from now on, once for the process."""
    register_optimizer_step_pre_hook(only_refuses(_before_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    # The step() of a pair's optimizer makes the update, or says why this pair makes none.
    if not isinstance(optimizer, FleetOptimizer) and not any(optimizer is own for own in _stepping):
        other_steps.before_step(optimizer)


def _refuse_step_past_the_pipeline(update: Optimizer, *_: Any) -> None:
    """Refuse a step of this update from outside the pipeline: its gradients would be this rank's alone."""
    if update.__dict__.get(STAND_IN) is not None:
        refuse_replaced(update)
    owner = update.__dict__.get(OWNER, lambda: None)()
    if owner is not None and owner.update is update and not owner.stepping:
        raise ConfigError(
            f"optimizer.update is the {type(update).__name__} that fleet.distribute(...) steps when gradients are reduced; "
            "called here, it would move this rank alone. Call step() or minimize(loss) of the optimizer that "
            "fleet.distribute(...) returned."
        )


@final
class FleetOptimizer(Optimizer):
    """What `fleet.distribute` returns. `minimize(loss)`, or `backward(loss)`, `step()`, `zero_grad()`.

    Examples:
        >>> model, optimizer = fleet.distribute(model, optimizer)
        >>> report = optimizer.minimize(criterion(model(x), y))
        >>> optimizer.backward(criterion(model(x), y))  # the same in three calls, to look at gradients between them
        >>> report = optimizer.step()
        >>> optimizer.zero_grad()
    """

    _step_supports_amp_scaling = True
    """A GradScaler leaves its scale and what it found on this optimizer, and lets step() decide: on all ranks alike."""

    def __init__(self, inner: Optimizer, strategy_waiting: DistributedStrategy | None = None) -> None:
        self.given, self.update = inner, inner
        """The optimizer that changes the parameters: the one given, or the one a strategy put in its place."""
        self.strategy_waiting = strategy_waiting
        """Given to fleet.distributed_optimizer(...), until its model comes; else None."""
        self._bound: Pipeline | None = None
        self.frozen: dict[str, nn.Parameter] = {}
        """The model's parameters that were not trainable when it was distributed."""
        self._zeroes_after_step = False
        self.stepping = False
        """Whether `update`, or the optimizer given, is being called from here: such calls are not sent back."""
        self.ended = ""
        """Why this pair trains nothing any more; empty while it does."""
        self.kept_by: list[KeptPairs] = []
        """Where the modules of the model hold this optimizer."""
        self.follow: Callable[[], None] = lambda: None
        """Makes a new layout of buckets for parameters that have joined the optimizer or were unfrozen."""
        self.forward_stage: Any = None
        """Autocast, under amp."""
        self.memory_plan: MemoryPlan | None = None
        """What recompute's budget came to."""
        self.plan: Plan | None = None
        """What strategy.auto came to."""
        self.strategy_record: dict[str, Any] | None = None
        """The strategy, as checkpoints hold it; None before there is one."""
        self.asked_of_auto: dict[str, Any] | None = None
        """What strategy.auto was asked, and for how many ranks; None where it chose nothing."""
        self._gathered: dict[str, Any] | None = None
        """The state dict of all ranks, inside of `state_gathered`."""
        self.take_up: Callable[[dict[str, Any]], None] | None = None
        """Takes another strategy that `auto` once chose, from a checkpoint; None where `auto` chose nothing."""
        # Made as an unpickled optimizer is made: hooks and profiling ready, groups and state not set up twice.
        super().__setstate__({"defaults": dict(inner.defaults)})

    def bind(self, pipeline: Pipeline, *, frozen: dict[str, nn.Parameter]) -> None:
        self._bound, self.frozen = pipeline, frozen
        self.update = pipeline.stages.update
        route(self.given, self)
        pipeline.layout_is_stale = _stale_layout(weakref.ref(self))
        pipeline.is_own_step = _own_step(weakref.ref(self))
        pipeline.is_own_optimizer = _own_optimizer(weakref.ref(self))
        if isinstance(self.update, Update):
            self.update.__dict__[OWNER] = weakref.ref(self)
            refuse_before_step(self.update, _refuse_step_past_the_pipeline)
        self._ids_seen = self._ids_in_order()
        self._frozen_here = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]

    def end(self, why: str) -> None:
        """Train nothing any more: later calls raise, and say why."""
        self.ended, self.forward_stage = why, None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle or copy the optimizer inside: a plain one, that needs no pair to be loaded."""
        if self._bound is not None and self._bound.stages.shard is not None:
            raise ConfigError(
                "a copy of the optimizer, or torch.save of it, would hold this rank's share of the state alone "
                "(strategy.sharding). Save optimizer.state_dict(), called on every rank; or write "
                "fleet.save_checkpoint(..., optimizer=optimizer)."
            )
        return self.update.__reduce_ex__(1)  # a later protocol makes pickle insist on the class of this very object

    def handles_step_of(self, optimizer: Optimizer) -> bool:
        """Return whether this step is made from here, or refused: that of the optimizer given, where another has taken its
        place."""
        is_replaced = self.update is not self.given and (optimizer is self.given or optimizer is self.update)
        return self.stepping or is_replaced

    def takes_calls(self) -> bool:
        return self._bound is not None and not self.ended and not self.stepping

    def has_stale_layout(self) -> bool:
        """Return whether a parameter joined this optimizer, was replaced in it or was unfrozen since the buckets were laid
        out."""
        return self._ids_in_order() != self._ids_seen or any(p.requires_grad for p in self._frozen_here)

    def _ids_in_order(self) -> list[int]:
        """List the ids of the parameters, by which a replaced one is seen: the buckets keep the old tensor alive, so that its id
        is not used again."""
        return [id(param) for group in self.param_groups for param in group["params"]]

    @property
    def pipeline(self) -> Pipeline:
        if self._bound is None:
            raise ConfigError(
                "this optimizer has met no model yet. Call fleet.distributed_model(model) too, or use fleet.distribute(...)."
            )
        return self._bound

    def parameter_ids(self) -> set[int]:
        return {id(p) for group in self.param_groups for p in group["params"]}

    # Shared, not copied: load_state_dict gives the inner optimizer new dicts, and a scheduler must see those.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.update.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.update.param_groups = groups

    @property
    def state(self) -> Any:
        if self._bound is not None:
            self._bound.outcomes.learn()
        return self.update.state

    @state.setter
    def state(self, state: Any) -> None:
        """Replace the state, as `optimizer.state = defaultdict(dict)` does to begin afresh."""
        if self._bound is not None:
            self._bound.outcomes.learn()
        self.update.state = state

    @property
    def due(self) -> bool:
        """Whether the coming micro-step closes a window (after its backward: whether it has)."""
        return self.pipeline.due

    @property
    def skipped(self) -> int:
        """Updates left out so far because a loss or gradient was not finite."""
        return self.pipeline.skipped

    def minimize(self, loss: Tensor, weight: float | None = None, *, retain_graph: bool = False) -> Report:
        """Run one micro-step: backward; when due reduce, update, average, zero."""
        self.backward(loss, weight, retain_graph=retain_graph)
        if not self.pipeline.window.closed:
            with self._steps():
                return self.pipeline.step()  # past torch's profiling of step(): inside a window nothing steps
        self._zeroes_after_step = True
        try:
            return self.step()  # the attribute, which a scheduler may have wrapped
        finally:
            self._zeroes_after_step = False

    def backward(self, loss: Tensor, weight: float | None = None, *, retain_graph: bool = False) -> None:
        """Run one backward. On a due micro-step it ends with true gradients: clip or look at them, then call step()."""
        self._refuse_ended()
        self.pipeline.leave_applied()
        self.follow_changed_parameters()
        self.pipeline.backward(loss, None if weight is None else _as_number(weight), retain_graph=retain_graph)

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> Report: ...
    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End a micro-step; when due, update. Returns the report; with a closure, what the closure returned, as torch does."""
        if closure is None:
            return self._step()
        returned: list[Any] = []

        def noted() -> Any:
            with torch.enable_grad():
                returned.append(closure())
            return returned[-1]

        if self.pipeline.window.closed and not self._runs_closure_first():
            self._refuse_own_update("step(closure)")
            self._step(noted)  # inside, as SAM does, whose second gradient is of other weights
        else:
            noted()
            self._step()
        return returned[-1] if returned else None

    def _runs_closure_first(self) -> bool:
        """Return whether the optimizer calls a closure once, before it looks at a gradient, as torch's own and ours do."""
        return type(self.update).__module__.startswith(("torch.optim.", "fleetx."))

    def _refuse_ended(self) -> None:
        if self.ended:
            raise ConfigError(self.ended)

    def _step(self, inside: Callable[[], Any] | None = None) -> Report:
        self._refuse_ended()
        self.follow_changed_parameters()
        scaling = self._scaling()
        with self._steps(), contextlib.nullcontext() if scaling is None else unscaled_here(self.given, scaling):
            return self.pipeline.step(recycle=self._zeroes_after_step, scaling=scaling, closure=inside)

    def _scaling(self) -> GradScaling | None:
        """Return what a GradScaler has left here, or on the optimizer that was given and whose fused kernel unscales by
        itself."""
        if vars(self).get("found_inf") is None and vars(self.given).get("found_inf") is None:
            return None
        stages = self.pipeline.stages
        scaling = scaling_of(self) or scaling_of(self.given, by_kernel=self.update is self.given and stages.clip is None)
        if scaling is not None:
            refuse_unfit(self.pipeline.stages)
        return scaling

    @contextlib.contextmanager
    def _steps(self) -> Iterator[None]:
        self.stepping = True
        _stepping.append(self.update)
        try:
            yield
        finally:
            _stepping.pop()
            self.stepping = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those reduced but not applied yet; inside a merge window nothing happens."""
        self.pipeline.forget_gradients(set_to_none=set_to_none)

    def flush(self) -> Report:
        """Close a window early, with the micro-batches it has. Every rank must call it, at the same place."""
        self._refuse_ended()
        with self._steps():
            return self.pipeline.flush()

    def rehearse_update(self) -> None:
        """Make an update that dry_run.py undoes."""
        with self._steps():
            dry_steps.update(self.pipeline)

    def average(self) -> None:
        """Average the weights now; every rank must call it. Under a per-step reducer they are equal already.

        A whole round of Local SGD, the outer step too. The schedule of later rounds stays as it is."""
        self._refuse_ended()
        self.pipeline.average_now()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the mean of all ranks' weights and statistics inside, each rank's own bits afterwards; every rank must enter it.

        For evaluation and export under Local SGD. Under a per-step reducer, or before `begin_step`, the two are the same."""
        with self.pipeline.mean_shown():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return torch's plain form, which has no place for what a compressor keeps back: fleet.save_checkpoint(...) has.

        Under strategy.sharding every rank must call it: it gathers the shares of all, as much as the whole state, on each."""
        if self._bound is not None:
            self._bound.outcomes.learn()  # counts of steps are on the host; no collective, since one rank may ask alone
        whole = self.gather_state() if self._gathered is None else self._gathered
        return self.update.state_dict() if whole is None else whole

    def gather_state(self, *, as_parts: bool = False) -> dict[str, Any] | None:
        """Return the state dict of all ranks' shares; None where each has the whole. Every rank is here, or is named.

        `as_parts`: as it is written, each share by its owner."""
        shard = None if self._bound is None or self.ended else self._bound.stages.shard
        if shard is None:
            return None
        self.pipeline.comm.wait_for_all(
            f"fleetx/state_dict/{self.pipeline.report_builder.pair}/{self.pipeline.index}",
            missing="does not save this optimizer, nor ask for its state_dict(): under strategy.sharding both gather the shares "
            "of all ranks. Do so on every rank, and use on one what state_dict() returns.",
        )
        return shard.parts_state_dict() if as_parts else shard.whole_state_dict()

    @contextlib.contextmanager
    def state_gathered(self) -> Iterator[None]:
        """Let one rank alone ask for state_dict() inside, as frameworks do. Every rank enters it."""
        self._gathered = self.gather_state()
        try:
            yield
        finally:
            self._gathered = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's plain form. What a compressor had kept back belongs to the weights before, and is dropped."""
        if self._bound is not None:
            self._bound.outcomes.learn()
        with self._steps():
            self.update.load_state_dict(state_dict)
        if self._bound is not None:
            self._bound.stages.reduce.forget()
            if self._bound.stages.shard is not None:
                self._bound.stages.shard.cut_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters from the next update on. Every rank must call it, between two updates."""
        if self._bound is not None:
            self._bound.leave_applied()
        if self._bound is not None and self._bound.window.closed and not self._bound.window.shared:
            raise ConfigError(
                "add_param_group between backward and step(): the new parameters' gradients are this rank's own. Call it before "
                "the backward, or after step()."
            )
        with self._steps():
            self.given.add_param_group(param_group)
        if self._bound is not None:
            self.follow_changed_parameters()

    def describe(self) -> str:
        """Say how the update treats each parameter, where a strategy has put an optimizer of its own in place."""
        described = self.update.describe() if isinstance(self.update, Update) else None
        return described or f"{type(self.update).__name__} treats the parameters of a group alike, as its groups say."

    def forget_norms(self) -> None:
        """Measure LARS's norms again (carry_norms), after a write to parameters through `.data`, which leaves no trace."""
        if not isinstance(self.update, Update):
            raise ConfigError(f"{type(self.update).__name__} keeps no norms from the last update. Leave forget_norms() out.")
        self.update.forget_norms()

    def __repr__(self) -> str:
        return f"FleetOptimizer({self.update!r})"

    def _of_given(self, name: str) -> Any:
        """Methods and attributes that the given optimizer has of its own: schedule-free's train(), SAM's first_step()."""
        if name.startswith("_") or name in ("grad_scale", "found_inf") or "given" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            value = getattr(self.given, name)
        except AttributeError as error:
            raise AttributeError(f"{error}.{did_you_mean(name, dir(type(self)))}") from None
        if "step" in name and callable(value):
            self._refuse_own_update(name)
            return self._checked_first(value)
        return value

    if not TYPE_CHECKING:  # checkers know the methods of this class, so that they find misspelt ones
        __getattr__ = _of_given

    def _checked_first(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that moves weights by itself, so that it meets the guards of step()."""

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> Any:
            self.pipeline.require_applicable()
            return method(*args, **settings)

        return call

    def _refuse_own_update(self, name: str) -> None:
        """Refuse a method that moves weights by itself where a stage between REDUCE and the next update would be left out."""
        part = self.pipeline.stages.after_reduce()
        if part is not None:
            raise ConfigError(
                f"{type(self.given).__name__}.{name} updates the weights by itself, past optimizer.step(), where strategy.{part} "
                f"acts. Leave strategy.{part} out, or use an optimizer whose step() makes the whole update."
            )

    def follow_changed_parameters(self) -> None:
        """Lay out buckets for parameters that were added, replaced or unfrozen; every rank has done so at the same place."""
        if self._bound is None or self.ended or self._bound.window.closed:
            return  # a window that is reduced gets its update first
        if self.has_stale_layout():
            self.follow()


def _stale_layout(optimizer: Callable[[], FleetOptimizer | None]) -> Callable[[], bool]:
    def is_stale() -> bool:
        found = optimizer()
        return found is not None and found.has_stale_layout()

    return is_stale


def _own_step(held: Callable[[], FleetOptimizer | None]) -> Callable[[Optimizer], bool]:
    def is_own_step(optimizer: Optimizer) -> bool:
        found = held()
        return found is not None and found.handles_step_of(optimizer)

    return is_own_step


def _own_optimizer(held: Callable[[], FleetOptimizer | None]) -> Callable[[Optimizer], bool]:
    def is_own_optimizer(optimizer: Optimizer) -> bool:
        found = held()
        return found is not None and (optimizer is found or optimizer is found.given or optimizer is found.update)

    return is_own_optimizer
