"""Hugging Face Accelerate trains by a FleetX strategy: Accelerator(strategy=...), and the loop stays as it is.

prepare          no DDP around the model: fleet.distribute(model, optimizer, strategy); the model comes back unwrapped
backward         optimizer.backward(loss); gradients are true ones when `sync_gradients`, so that clipping is right
accumulate       gradient_accumulation_steps=k becomes gradient_merge of k; or strategy.gradient_merge, but not both
optimizer.step   nothing inside a window; the scheduler moves when the window closes, by Accelerate's own count (as many
                 moves an update as there are processes, unless split_batches=True)
save_state       beside Accelerate's files a folder `fleetx`: each rank's own weights, residuals, counters, random numbers

Not public in Accelerate, and used: Accelerator._optimizers.
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

from fleetx import fleet
from fleetx.dist import world
from fleetx.engine.pairs import leaves
from fleetx.errors import CheckpointError, ConfigError
from fleetx.integrations import require_seams
from fleetx.integrations.accelerate_optimizer import (
    FREED,
    TAKEN,
    FleetAcceleratedOptimizer,
    accelerate,
    copied,
    living,
    merged,
    refuse_handlers,
    with_precision,
    world_shown,
)
from fleetx.integrations.refusals import refuse_plans, refuse_second_clipping
from fleetx.strategy import DistributedStrategy

PlainAccelerator: Any = accelerate.Accelerator
SEAMS = ("prepare", "prepare_model", "prepare_optimizer", "prepare_scheduler", "backward", "clip_grad_norm_", "save_state")
MORE_SEAMS = ("load_state", "get_state_dict", "register_load_state_pre_hook", "free_memory", "accumulate", "no_sync")
require_seams(PlainAccelerator, (*SEAMS, *MORE_SEAMS))

FOLDER = "fleetx"
"""Of the strategy's state, inside a folder of save_state."""


class Accelerator(PlainAccelerator):  # type: ignore[misc]
    """accelerate.Accelerator with one more keyword, `strategy`; the objects that prepare() returns train by it."""

    def __init__(self, *args: Any, strategy: DistributedStrategy | None = None, **kwargs: Any) -> None:
        refuse_handlers(kwargs.get("kwargs_handlers") or ())
        strategy = copied(strategy)
        refuse_plans(strategy, who="Accelerator(strategy=...)")
        wants_cpu = bool(kwargs.get("cpu")) or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        world.open_world(device=torch.device("cpu") if wants_cpu else None)
        if len(args) > 2:
            raise ConfigError("give mixed_precision and what follows it by name: Accelerator(mixed_precision=..., strategy=...).")
        precision = kwargs.pop("mixed_precision", None) or os.environ.get("ACCELERATE_MIXED_PRECISION")
        precision = None if precision is None else str(precision).lower()
        # Without it a job of several CPU processes is, to Accelerate, as many jobs of one.
        kwargs["cpu"] = fleet.device().type == "cpu"
        with world_shown(os.environ):
            super().__init__(*args, mixed_precision="no", **kwargs)
        steps = int(self.gradient_accumulation_steps)
        chosen = merged(with_precision(strategy, precision), steps, said="gradient_accumulation_steps")
        self._adopt(chosen, window=steps, is_hosted=False)

    @classmethod
    def of(cls, plain: Any, strategy: DistributedStrategy, *, window: int) -> Accelerator:
        """One that a framework has made, changed in place. `window`: the most micro-batches that it puts into one update."""
        refuse_plans(strategy, who=f"{type(plain).__name__}")
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
        """What backward divides losses by; 1 where a framework divides them itself."""
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
        """Models first: an optimizer needs the one it trains, wherever that stands."""
        placed = kwargs.get("device_placement") or [None] * len(args)
        if len(placed) == len(args):  # else Accelerate says so
            pairs = zip(args, placed, strict=True)
            args = tuple(self.prepare_model(a, where) if isinstance(a, nn.Module) else a for a, where in pairs)
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """`evaluation_mode` is Accelerate's word for: do not wrap."""
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
        self._forget_released()
        _, face = fleet.distribute(model, optimizer, self.strategy)
        ours = FleetAcceleratedOptimizer(face, model, hosted=self._window > 1)
        self._optimizers.append(ours)
        return ours

    def _take_from_others(self, trained: set[int]) -> None:
        """From trainings before this one. They end loudly if they go on; two of this accelerator's are refused as elsewhere."""
        mine = self.pairs
        for other in list(living):
            if not any(other is ours for ours in mine) and other.optimizer.parameter_ids() & trained:
                other.release(TAKEN)

    def free_memory(self, *objects: Any) -> Any:
        """A framework calls it before it prepares the very same optimizer again, which goes on from its state."""
        for ours in self.pairs:
            if self._is_hosted:
                ours.drop_half_window()
            else:
                ours.release(FREED)
        self._prepared.clear()
        return super().free_memory(*objects)

    def release(self) -> None:
        """Nothing of the strategy stays in the models: for whatever trains them next."""
        for ours in self.pairs:
            ours.release(FREED)
        self._forget_released()

    def _forget_released(self) -> None:
        self._optimizers[:] = [kept for kept in self._optimizers if getattr(kept, "released", None) is None]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that was built on the optimizer before prepare() follows the one in its place."""
        given = getattr(scheduler, "optimizer", None)
        prepared = super().prepare_scheduler(scheduler)
        owners = [ours for ours in self.pairs if given is ours.optimizer.given or given is ours]
        if owners:
            prepared.optimizers = owners
        return prepared

    # --- one step -------------------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-step closes a window: Accelerate's, or the strategy's own."""
        return bool(self.gradient_state.sync_gradients) and (self._window > 1 or all(ours.optimizer.due for ours in self.pairs))

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """optimizer.backward(loss): when `sync_gradients`, it ends with true gradients."""
        known = {name: kwargs.pop(name) for name in ("weight", "retain_graph") if name in kwargs}
        if kwargs:
            raise ConfigError(f"accelerator.backward was given {', '.join(sorted(kwargs))}; it takes weight and retain_graph.")
        self._refuse_changed_accumulation()
        self._refuse_released()
        face = self._owner_of(loss).optimizer
        face.backward(loss / self.gradient_accumulation_steps, **known)
        if self._window > 1 and self.gradient_state.sync_gradients and not face.pipeline.window.closed:
            face.pipeline.reduce_early()  # the last window of an epoch may be a short one; all ranks are at their last batch

    def _refuse_changed_accumulation(self) -> None:
        """How many micro-batches make one update is compiled into the strategy."""
        found = int(self.gradient_accumulation_steps)
        if found != self._divisor:
            raise ConfigError(
                f"gradient_accumulation_steps was {self._divisor} when the Accelerator was made and is {found} now, set since or "
                f"by another Accelerator: they share it. Write Accelerator(gradient_accumulation_steps={found}, ...)."
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
        """accumulate() and Trainer enter it inside windows that they have said; a user's own would be one nobody knows of."""
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
        """Of true gradients. Inside a window there are none yet: nothing is done, and None comes back."""
        asks_alone = max_norm == float("inf")  # for the norm: gradients stay as they are
        if not asks_alone:
            self._refuse_clipping(f"accelerator.clip_grad_norm_(..., {max_norm})")
        if not self._window_is_closed():
            return None
        if asks_alone:
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
        """Whether there are true gradients to clip: not inside a window."""
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
        """For save_model too."""
        for ours in self.pairs:
            if ours.model is model and ours.shows_own_weights:
                raise ConfigError(
                    "under Local SGD each rank has weights of its own. On every rank write: "
                    "with optimizer.averaged(): accelerator.save_model(model, folder)"
                )
        return super().get_state_dict(model, unwrap)

    def averaged(self) -> contextlib.ExitStack:
        """Under Local SGD the mean of all ranks' weights inside; every rank must enter it."""
        shown = contextlib.ExitStack()
        for ours in self.pairs:
            shown.enter_context(ours.optimizer.averaged())
        return shown

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's files hold the average under Local SGD; the strategy's folder what each rank goes on from."""
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
        """Every rank calls it."""
        self._refuse_released()
        if not self.pairs:
            return
        if fleet.is_first_worker():  # before any collective: an older run's state, of a later step, would be taken instead
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
        step = self.pairs[0].optimizer.pipeline.index
        fleet.save_checkpoint(folder / FOLDER, step=step, keep=1, **self._states())

    def load_strategy_state(self, folder: Path) -> None:
        """Every rank calls it."""
        self._refuse_released()
        if self.pairs and fleet.load_checkpoint(folder / FOLDER, **self._states()) is None:
            raise CheckpointError(
                f"{folder} has no folder `{FOLDER}`: saved without the strategy, whose counters and residuals are missing. "
                "Start from its weights instead: load them into the model before accelerator.prepare(...)."
            )
        for ours in self.pairs:
            ours.report = None  # of the step before, which the weights are no longer of

    def _states(self) -> dict[str, Any]:
        models = {f"model_{i}": ours.model for i, ours in enumerate(self.pairs)}
        return models | {f"optimizer_{i}": ours.optimizer for i, ours in enumerate(self.pairs)}


def _device_of(accelerator: Any) -> torch.device:
    """Accelerate counts CPUs ("cpu:0"), and a single GPU it does not ("cuda")."""
    device: torch.device = accelerator.device
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def _as_list(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
