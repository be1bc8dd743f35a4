"""Train in Hugging Face Accelerate by a FleetX strategy: Accelerator(strategy=...), and the loop stays unchanged.

prepare          no DDP around the model: fleet.distribute(model, optimizer, strategy); the model comes back unwrapped
backward         optimizer.backward(loss); with `sync_gradients` it ends with true gradients, so that clipping is right
accumulate       gradient_accumulation_steps=k becomes gradient_merge of k; or strategy.gradient_merge, but not both
optimizer.step   does nothing inside a window; the scheduler moves when the window closes, by Accelerate's count (as many
                 moves per update as there are processes, unless split_batches=True)
save_state       adds a folder `fleetx` to Accelerate's files: each rank's weights, residuals, counters, random states

Private in Accelerate, but used: Accelerator._optimizers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import fleet
from ..dist import world
from ..engine.user_loop.model_pairs import leaves
from ..errors import CheckpointError, ConfigError
from ..strategy import DistributedStrategy
from . import require_seams
from .accelerate_optimizer import (
    FREED,
    TAKEN,
    FleetAcceleratedOptimizer,
    accelerate,
    copied,
    instances,
    merged,
    refuse_handlers,
    with_precision,
    world_shown,
)
from .refusals import refuse_divided_weights, refuse_plans, refuse_second_clipping

PlainAccelerator: Any = accelerate.Accelerator
SEAMS = ("prepare", "prepare_model", "prepare_optimizer", "prepare_scheduler", "backward", "clip_grad_norm_", "save_state")
MORE_SEAMS = ("load_state", "get_state_dict", "register_load_state_pre_hook", "free_memory", "accumulate", "no_sync")
require_seams(PlainAccelerator, (*SEAMS, *MORE_SEAMS))

FOLDER = "fleetx"
"""Name of the strategy's folder inside a folder of save_state."""


class Accelerator(PlainAccelerator):  # type: ignore[misc]
    """accelerate.Accelerator with one more keyword, `strategy`, which the objects from prepare() then train by."""

    def __init__(self, *args: Any, strategy: DistributedStrategy | None = None, **kwargs: Any) -> None:
        refuse_handlers(kwargs.get("kwargs_handlers") or ())
        strategy = copied(strategy)
        refuse_plans(strategy, who="Accelerator(strategy=...)")
        refuse_divided_weights(strategy, who="Accelerator(strategy=...)")
        wants_cpu = bool(kwargs.get("cpu")) or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        world.open_world(device=torch.device("cpu") if wants_cpu else None)
        if len(args) > 2:
            raise ConfigError("give mixed_precision and what follows it by name: Accelerator(mixed_precision=..., strategy=...).")
        precision = kwargs.pop("mixed_precision", None) or os.environ.get("ACCELERATE_MIXED_PRECISION")
        precision = None if precision is None else str(precision).lower()
        # Without it Accelerate takes a job of several CPU processes for as many jobs of one process.
        kwargs["cpu"] = fleet.device().type == "cpu"
        with world_shown(os.environ):
            super().__init__(*args, mixed_precision="no", **kwargs)
        steps = int(self.gradient_accumulation_steps)
        chosen = merged(with_precision(strategy, precision), steps, said="gradient_accumulation_steps")
        self._adopt(chosen, window=steps, is_hosted=False)

    @classmethod
    def of(cls, plain: Any, strategy: DistributedStrategy, *, window: int) -> Accelerator:
        """Convert a framework's Accelerator in place. `window`: the largest number of micro-batches of one update."""
        refuse_plans(strategy, who=f"{type(plain).__name__}")
        refuse_divided_weights(strategy, who=f"{type(plain).__name__}")
        world.open_world(device=_device_of(plain))
        plain.__class__ = cls
        accelerator: Accelerator = plain
        accelerator._adopt(strategy, window=window, is_hosted=True)
        return accelerator

    def _adopt(self, strategy: DistributedStrategy, *, window: int, is_hosted: bool) -> None:
        kind = str(self.distributed_type).rpartition(".")[2]
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ConfigError(
                f"Accelerate is set up for {kind}, which shards or wraps the model itself. A strategy needs none of it."
            )
        if self.num_processes != fleet.worker_num():
            raise ConfigError(
                f"Accelerate sees {self.num_processes} processes, fleet.init() {fleet.worker_num()}. On CPUs tell Accelerate so "
                "(cpu=True; TrainingArguments(use_cpu=True)); start with fleetrun, torchrun or accelerate launch."
            )
        if _device_of(self) != fleet.device():
            raise ConfigError(
                f"Accelerate trains on {self.device}, fleet.init() on {fleet.device()}. Create the Accelerator first."
            )
        self.strategy, self._window = strategy, window
        self._is_hosted, self._accumulates = is_hosted, False
        self._divisor = int(self.gradient_accumulation_steps)
        """Divisor of losses in backward; 1 where a framework divides them itself."""
        self._prepared: list[nn.Module] = []

    @property
    def _all_pairs(self) -> list[FleetAcceleratedOptimizer]:
        return [optimizer for optimizer in self._optimizers if isinstance(optimizer, FleetAcceleratedOptimizer)]

    @property
    def pairs(self) -> list[FleetAcceleratedOptimizer]:
        return [ours for ours in self._all_pairs if ours.released is None and not ours.optimizer.ended]

    def _refuse_released(self) -> None:
        for ours in self._all_pairs:
            ours.refuse_released()

    # --- prepare --------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare models first: an optimizer needs the model it trains, whatever the order of arguments."""
        placed = kwargs.get("device_placement") or [None] * len(args)
        if len(placed) == len(args):  # else Accelerate raises an error
            pairs = zip(args, placed, strict=True)
            args = tuple(self.prepare_model(a, where) if isinstance(a, nn.Module) else a for a, where in pairs)
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Place the model without wrapping it: that is what Accelerate's `evaluation_mode` means."""
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if not any(prepared is known for known in self._prepared):
            self._prepared.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, FleetAcceleratedOptimizer):
            optimizer.refuse_released()
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement=device_placement)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        model = next((m for m in self._prepared if any(id(p) in trained for p in m.parameters())), None)
        if model is None:
            raise ConfigError(
                "no prepared model has this optimizer's parameters. Write accelerator.prepare(model, optimizer, ...)."
            )
        self._take_from_others(trained)
        self._remove_released()
        _, fleet_optimizer = fleet.distribute(model, optimizer, self.strategy)
        ours = FleetAcceleratedOptimizer(fleet_optimizer, model, hosted=self._window > 1)
        self._optimizers.append(ours)
        return ours

    def _take_from_others(self, trained: set[int]) -> None:
        """Release these parameters from pairs of other accelerators, which raise if they go on training."""
        mine = self.pairs
        for other in list(instances):
            if not any(other is ours for ours in mine) and other.optimizer.parameter_ids() & trained:
                other.release(TAKEN)

    def free_memory(self, *objects: Any) -> Any:
        """Release the pairs; in a framework keep them, since it prepares the same optimizer again and goes on from its state."""
        for ours in self.pairs:
            if self._is_hosted:
                ours.drop_half_window()
            else:
                ours.release(FREED)
        self._prepared.clear()
        return super().free_memory(*objects)

    def release(self) -> None:
        """Remove the strategy from the models, so that they can be trained by other means."""
        for ours in self.pairs:
            ours.release(FREED)
        self._remove_released()

    def _remove_released(self) -> None:
        self._optimizers[:] = [kept for kept in self._optimizers if getattr(kept, "released", None) is None]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler; one built on the optimizer before prepare() follows the prepared optimizer."""
        given = getattr(scheduler, "optimizer", None)
        prepared = super().prepare_scheduler(scheduler)
        owners = [ours for ours in self.pairs if given is ours.optimizer.given or given is ours]
        if owners:
            prepared.optimizers = owners
        return prepared

    # --- one step -------------------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-step closes a merge window: Accelerate's, or the strategy's own."""
        return bool(self.gradient_state.sync_gradients) and (self._window > 1 or all(ours.optimizer.due for ours in self.pairs))

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call optimizer.backward(loss); with `sync_gradients` it ends with true gradients."""
        known = {name: kwargs.pop(name) for name in ("weight", "retain_graph") if name in kwargs}
        if kwargs:
            raise ConfigError(f"accelerator.backward was given {', '.join(sorted(kwargs))}; it takes weight and retain_graph.")
        self._refuse_changed_accumulation()
        self._refuse_released()
        fleet_optimizer = self._owner_of(loss).optimizer
        fleet_optimizer.backward(loss / self.gradient_accumulation_steps, **known)
        if self._window > 1 and self.gradient_state.sync_gradients and not fleet_optimizer.pipeline.window.closed:
            fleet_optimizer.pipeline.reduce_early()  # the last window of an epoch may be short; all ranks are at their last batch

    def _refuse_changed_accumulation(self) -> None:
        """Raise if gradient_accumulation_steps has changed: the strategy is built for a fixed number."""
        steps = int(self.gradient_accumulation_steps)
        if steps != self._divisor:
            raise ConfigError(
                f"gradient_accumulation_steps was {self._divisor} when the Accelerator was made and is {steps} now, set since or "
                f"by another Accelerator: they share it. Write Accelerator(gradient_accumulation_steps={steps}, ...)."
            )

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        before, self._accumulates = self._accumulates, True
        try:
            with super().accumulate(*models):
                yield
        finally:
            self._accumulates = before

    def no_sync(self, model: Any) -> Any:
        """Allow no_sync inside accumulate() and Trainer, whose windows are known; refuse it elsewhere."""
        if not self._accumulates and not self._is_hosted:
            raise ConfigError(
                "accelerator.no_sync(model) is DDP's, and each backward here is one of a window whose length is known. Write "
                "Accelerator(gradient_accumulation_steps=...), and `with accelerator.accumulate(model):` around each micro-batch."
            )
        return super().no_sync(model)

    def _owner_of(self, loss: Tensor) -> FleetAcceleratedOptimizer:
        if len(self.pairs) == 1:
            return self.pairs[0]
        reached = {id(leaf) for leaf in leaves(loss)}
        owners = [ours for ours in self.pairs if reached & ours.optimizer.parameter_ids()]
        if len(owners) != 1:
            raise ConfigError(
                f"this loss reaches the parameters of {len(owners)} prepared optimizers; accelerator.backward(loss) trains one. "
                "Write optimizer.backward(loss), of the optimizer that is to step; others are then left alone."
            )
        return owners[0]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip true gradients. Inside a window there are none yet: do nothing and return None."""
        measures_only = max_norm == float("inf")  # asks for the norm; gradients stay unchanged
        if not measures_only:
            self._refuse_clipping(f"accelerator.clip_grad_norm_(..., {max_norm})")
        if not self._window_is_closed():
            return None
        if measures_only:
            grads = [p.grad for p in _as_list(parameters) if p.grad is not None]
            return torch.nn.utils.get_total_norm(grads, norm_type)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self._refuse_clipping(f"accelerator.clip_grad_value_(..., {clip_value})")
        if self._window_is_closed():
            super().clip_grad_value_(parameters, clip_value)

    def _refuse_clipping(self, said: str) -> None:
        refuse_second_clipping(self.strategy, said, write="Leave the call out, or the strategy's part.")

    def _window_is_closed(self) -> bool:
        """Check whether there are true gradients to clip: not inside a window."""
        return any(ours.optimizer.pipeline.window.closed for ours in self.pairs)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[None]:
        if autocast_handler is not None:
            raise ConfigError(
                "accelerator.autocast(autocast_handler=...) would not be followed: strategy.amp_configs has the precision. Leave "
                "it out; torch.autocast(device_type, enabled=False) around a few lines turns it off there."
            )
        return fleet.autocast()

    def join_uneven_inputs(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            "join_uneven_inputs is DDP's. Give every rank equally many batches: even_batches=True, the default, does."
        )

    # --- files ----------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the weights, also for save_model; refused under Local SGD, where each rank has its own."""
        for ours in self.pairs:
            if ours.model is model and ours.shows_own_weights:
                raise ConfigError(
                    "under Local SGD each rank has weights of its own. On every rank write: "
                    "with optimizer.averaged(): accelerator.save_model(model, folder)"
                )
        return super().get_state_dict(model, unwrap)

    def averaged(self) -> contextlib.ExitStack:
        """Show the mean of all ranks' weights inside, under Local SGD; every rank must enter it."""
        shown = contextlib.ExitStack()
        for ours in self.pairs:
            shown.enter_context(ours.optimizer.averaged())
        return shown

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save: under Local SGD Accelerate's files hold the average; the strategy's folder holds each rank's own state."""
        self._refuse_released()
        with self.averaged():
            saved = super().save_state(output_dir, *args, **kwargs)
        self.save_strategy_state(Path(saved))
        return saved

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        folders: list[Path] = []
        hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(Path(folder)))
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            hook.remove()
        self.load_strategy_state(folders[-1])

    def save_strategy_state(self, folder: Path) -> None:
        """Save each rank's own state; every rank must call it."""
        self._refuse_released()
        if not self.pairs:
            return
        if fleet.is_first_worker():  # before any collective: the state of an older run at a later step would be loaded instead
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
        step = self.pairs[0].optimizer.pipeline.index
        fleet.save_checkpoint(folder / FOLDER, step=step, keep=1, **self._states())

    def load_strategy_state(self, folder: Path) -> None:
        """Load each rank's own state; every rank must call it."""
        self._refuse_released()
        if self.pairs and fleet.load_checkpoint(folder / FOLDER, **self._states()) is None:
            raise CheckpointError(
                f"{folder} has no folder `{FOLDER}`: saved without the strategy, whose counters and residuals are missing. "
                "Start from its weights instead: load them into the model before accelerator.prepare(...)."
            )
        for ours in self.pairs:
            ours.report = None  # it belongs to the weights before loading

    def _states(self) -> dict[str, Any]:
        models = {f"model_{i}": ours.model for i, ours in enumerate(self.pairs)}
        return models | {f"optimizer_{i}": ours.optimizer for i, ours in enumerate(self.pairs)}


def _device_of(accelerator: Any) -> torch.device:
    """Return the device as fleet names it: Accelerate numbers a CPU ("cpu:0") and may not number a GPU ("cuda")."""
    device: torch.device = accelerator.device
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def _as_list(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
