"""Train in Lightning by a FleetX strategy: Trainer(strategy=FleetStrategy(strategy)); the LightningModule stays unchanged.

setup_environment  Lightning makes the process group, or finds one; it is adopted
setup_optimizers   no DDP around the module: fleet.distribute(module, optimizer) for what configure_optimizers returned
backward           optimizer.backward(loss): Lightning's clipping and hooks then see true gradients
optimizer_step     Lightning's own; the last window of an epoch may be short
on_validation_*    under Local SGD the average is validated and saved (lightning_checkpoints.py)
teardown           the module is plain again; the optimizers keep their states, for Trainer.save_checkpoint

Private in Lightning, but used: Strategy._layer_sync, Strategy._lightning_optimizers.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .. import fleet
from ..dist import comm as c10d
from ..dist import world
from ..engine.optimizer import FleetOptimizer
from ..engine.report import Report
from ..engine.setup.bind import LossFn, give_up
from ..engine.setup.placement import broadcast_from_first
from ..engine.user_loop.model_pairs import leaves
from ..errors import ConfigError
from ..strategy import DistributedStrategy
from . import lightning_checkpoints as checkpoints
from .lightning_refusals import (
    homes_of,
    refuse_changed_accumulation,
    refuse_no_loss,
    refuse_overridden,
    refuse_what_both_claim,
)
from .refusals import refuse_divided_weights

OLDEST = (2, 4)
PASSED_ON = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
)
SEAMS = ("configure_ddp", "setup_environment", "setup_optimizers", "optimizer_step", "load_optimizer_state_dict")


def _lightning() -> Any:
    """Import the package in use: `lightning.pytorch` and `pytorch_lightning` hold the same code, but not the same classes."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        names.reverse()
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ConfigError('fleetx.integrations.lightning needs Lightning, which is not installed: pip install "fleetx[lightning]".')


def _checked(package: Any) -> Any:
    version = tuple(int(number) for number in package.__version__.split(".")[:2])
    missing = [name for name in SEAMS if not hasattr(package.strategies.DDPStrategy, name)]
    if version < OLDEST or missing:
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        raise ConfigError(f"FleetStrategy needs Lightning 2.4 or later; this is {package.__version__}{lacks}.")
    return package


pl: Any = _checked(_lightning())


class FleetStrategy(pl.strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning strategy that trains by `strategy`; `sample` and `loss_fn` are those of fleet.distribute.

    `report` is the report of the last step, for logging: `trainer.strategy.report`.
    """

    optimizers: list[Any]

    def __init__(
        self,
        strategy: DistributedStrategy | None = None,
        *,
        sample: Any = None,
        loss_fn: LossFn | None = None,
        **lightning: Any,
    ) -> None:
        unknown = sorted(set(lightning) - set(PASSED_ON))
        if unknown:
            raise ConfigError(
                f"FleetStrategy has no {', '.join(unknown)}: nothing is wrapped in DDP here. It takes a "
                "fleet.DistributedStrategy (which has find_unused_parameters), sample, loss_fn, and of Lightning's own "
                f"{', '.join(PASSED_ON)}."
            )
        if strategy is not None and not isinstance(strategy, DistributedStrategy):
            raise ConfigError(f"FleetStrategy was given {type(strategy).__name__}; it takes a fleet.DistributedStrategy.")
        super().__init__(**lightning)
        self.fleet_strategy = (strategy or DistributedStrategy()).copy()
        self.report: Report | None = None
        self._sample, self._loss_fn = sample, loss_fn
        self._merged = 1
        """Batches of one update, where Lightning counts them."""
        self._multiplies = False
        """Whether the merge is the strategy's own, which takes undivided losses: Lightning's division is then undone."""
        self._counted: Any = None
        """The Trainer whose accumulate_grad_batches was set to the strategy's merge; None if none was."""
        self._pairs: list[tuple[nn.Module, FleetOptimizer]] = []
        """Modules and their optimizers during a fit; released from the modules at its end."""
        self._shown = contextlib.ExitStack()
        self._shows_average = False
        self._path: Any = None
        self._trains = False

    # --- setup and teardown of a fit ------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        """Check the world while the Trainer is made, before Lightning starts processes."""
        super().set_world_ranks()
        self._refuse_other_world()

    def setup_environment(self) -> None:
        self._refuse_other_world()
        super().setup_environment()
        world.open_world(device=self.root_device)
        self._refuse_other_world()
        atexit.register(c10d.close_group)  # Lightning leaves a gloo group open, whose threads may outlive the interpreter

    def _refuse_other_world(self) -> None:
        if not world.is_open():
            return
        here = world.current()
        if here.comm.size != self.world_size:
            raise ConfigError(
                f"fleet.init() has joined a job of {here.comm.size} rank(s) before Lightning has made one of {self.world_size}. "
                "Leave fleet.init() out: FleetStrategy calls it when the processes are there; or start them first: fleetrun "
                f"--nproc_per_node {self.num_processes} train.py."
            )
        if here.device != self.root_device:
            raise ConfigError(
                f"fleet.init() has chosen {here.device}, and Lightning {self.root_device}. Leave fleet.init() out: FleetStrategy "
                "calls it with Lightning's device."
            )

    def configure_ddp(self) -> None:
        """Do nothing: the module is not wrapped."""

    def setup_optimizers(self, trainer: Any) -> None:
        module = self.lightning_module
        if self._layer_sync is not None:
            raise ConfigError("Trainer(sync_batchnorm=True) is torch's SyncBatchNorm. Write strategy.sync_batch_norm = True.")
        refuse_what_both_claim(trainer, self.precision_plugin, self.fleet_strategy)
        refuse_divided_weights(self.fleet_strategy, who="FleetStrategy")
        refuse_overridden(module, pl.LightningModule)
        self._count_batches(trainer)
        super().setup_optimizers(trainer)
        homes = homes_of(module, self.optimizers)
        if len(homes) > 1:  # for parameters that belong to none of them
            broadcast_from_first(module, {}, world.current().comm)
        for home, given in zip(homes, self.optimizers, strict=True):
            self._pairs.append((home, self._distribute(home, given)))
        self.optimizers = [fleet_optimizer for _, fleet_optimizer in self._pairs]
        self._follow_plan(trainer)
        self._trains = True

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        for wrapped in self._lightning_optimizers:
            # These methods set attributes on their `self`, which must be the optimizer, not Lightning's wrapper around it.
            wrapped.flush, wrapped.minimize = wrapped.optimizer.flush, _no_minimize

    def _count_batches(self, trainer: Any) -> None:
        """Give the merge to Lightning's loop, which decides when an update is due, for schedulers, global_step and max_steps."""
        strategy = self._merging = self.fleet_strategy.copy()
        self._multiplies = bool(strategy.gradient_merge) and self.lightning_module.automatic_optimization
        if self._multiplies:
            trainer.accumulate_grad_batches = strategy.gradient_merge_configs["k_steps"]
            self._counted = trainer
        elif trainer.accumulate_grad_batches > 1:
            strategy.gradient_merge = True  # Lightning has divided the losses already: their sum is the mean
            strategy.gradient_merge_configs = {"k_steps": trainer.accumulate_grad_batches, "avg": False}
        self._merged = trainer.accumulate_grad_batches

    def _follow_plan(self, trainer: Any) -> None:
        """Set Lightning's accumulation to the merge that strategy.auto has chosen."""
        chosen = self.optimizers[0].pipeline.stages.merge.micro_steps
        if self.lightning_module.automatic_optimization and chosen != self._merged:
            self._multiplies, self._counted = True, trainer
            self._merged = trainer.accumulate_grad_batches = chosen

    def _release(self) -> None:
        """Remove the strategy from the module, so that another Trainer may fit it by any strategy."""
        while self._pairs:
            home, fleet_optimizer = self._pairs.pop()
            if fleet_optimizer.update is not fleet_optimizer.given:
                # give_up removes the strategy's settings from the user's groups; the copies keep them, to be saved.
                fleet_optimizer.update.param_groups = [dict(group) for group in fleet_optimizer.update.param_groups]
            give_up(home, fleet_optimizer)

    def _distribute(self, home: nn.Module, given: Any) -> FleetOptimizer:
        _, fleet_optimizer = fleet.distribute(home, given, self._merging, sample=self._sample, loss_fn=self._loss_fn)
        strategy_ref, optimizer_ref = weakref.ref(self), weakref.ref(fleet_optimizer)  # a cycle would keep a discarded pair alive

        def step(_: Any, closure: Callable[[], Any] | None = None) -> Any:
            """Step after running Lightning's closure once: forward, backward, hooks and clipping."""
            result = None if closure is None else closure()
            fleet_optimizer, strategy = optimizer_ref(), strategy_ref()
            assert fleet_optimizer is not None
            report = FleetOptimizer.step(fleet_optimizer)
            if strategy is not None:
                strategy.report = report
            return report if closure is None else result

        # A method, not a function: that is what a scheduler wraps.
        vars(fleet_optimizer)["step"] = types.MethodType(step, weakref.proxy(fleet_optimizer))
        return fleet_optimizer

    # --- each batch ---------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Mark the start of training again: a callback that tried learning rates has ended like a training."""
        super().on_train_start()
        self._trains = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if output is None and self.lightning_module.automatic_optimization:
            refuse_no_loss(self.lightning_module)
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module, plugin = self.lightning_module, self.precision_plugin
        retains = _retain_graph(args, kwargs)
        fleet_optimizer = self._owner_of(closure_loss)
        self._refuse_backward(fleet_optimizer)
        self.pre_backward(closure_loss)
        loss = plugin.pre_backward(closure_loss, module)
        fleet_optimizer.backward(loss * self._merged if self._multiplies and self._merged > 1 else loss, retain_graph=retains)
        if module.automatic_optimization and not fleet_optimizer.pipeline.window.closed:
            fleet_optimizer.pipeline.step()  # Lightning calls step() only when an update is due; this ends the micro-step
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss  # type: ignore[no-any-return]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def run() -> Any:
            result = closure()
            if self.lightning_module.automatic_optimization and not optimizer.pipeline.window.closed:
                optimizer.pipeline.reduce_early()  # the last batches of an epoch, fewer than a whole window
            return result

        return super().optimizer_step(optimizer, run, model, **kwargs)

    def _owner_of(self, loss: Tensor) -> FleetOptimizer:
        """Return the optimizer of this loss: the one whose parameters it reaches."""
        fleet_optimizers: list[FleetOptimizer] = self.optimizers
        if len(fleet_optimizers) == 1:
            return fleet_optimizers[0]
        reached = {id(leaf) for leaf in leaves(loss)}
        owners = [
            number for number, fleet_optimizer in enumerate(fleet_optimizers) if fleet_optimizer.pipeline.param_ids & reached
        ]
        if len(owners) != 1:
            raise ConfigError(
                f"this loss reaches the parameters of optimizers {owners} of {len(fleet_optimizers)}, and is meant for one. Put "
                "self.toggle_optimizer(opt) before its forward and self.untoggle_optimizer(opt) after step(), or write "
                "opt.backward(loss) in place of self.manual_backward(loss)."
            )
        return fleet_optimizers[owners[0]]

    def _refuse_backward(self, fleet_optimizer: FleetOptimizer) -> None:
        if self.lightning_module.automatic_optimization:
            refuse_changed_accumulation(self.lightning_module.trainer.accumulate_grad_batches, self._merged)
        elif fleet_optimizer.pipeline.window.closed:
            raise ConfigError(
                "self.manual_backward(loss) came twice before opt.step(). Add the losses and call it once; or, to make one "
                "update of several batches, call opt.step() after each and write strategy.gradient_merge = True with "
                'strategy.gradient_merge_configs = {"k_steps": ...}.'
            )

    # --- Local SGD: the average is validated and saved ----------------------------------------------------------------

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._show_average()

    def on_validation_end(self) -> None:
        self._show_own()
        super().on_validation_end()

    def on_train_end(self) -> None:
        """Average at the end of training, so that all ranks leave with the same weights."""
        super().on_train_end()
        for fleet_optimizer in self.optimizers:
            if fleet_optimizer.pipeline.window.micro_steps:
                fleet_optimizer.flush()
            fleet_optimizer.average()
        self._trains = False

    def _averages(self) -> bool:
        return self._trains and any(fleet_optimizer.pipeline.averages for fleet_optimizer in self.optimizers)

    def _show_average(self) -> None:
        if self._averages():
            for fleet_optimizer in self.optimizers:
                self._shown.enter_context(fleet_optimizer.averaged())
            self._shows_average = True

    def _show_own(self) -> None:
        self._shows_average = False
        self._shown.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._shows_average or not self._averages() or self._is_interrupted():
            return super().lightning_module_state_dict()  # type: ignore[no-any-return]
        with contextlib.ExitStack() as shown:
            for fleet_optimizer in self.optimizers:
                shown.enter_context(fleet_optimizer.averaged())
            state = super().lightning_module_state_dict()
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        fleet_optimizers = [fleet_optimizer for fleet_optimizer in self.optimizers if isinstance(fleet_optimizer, FleetOptimizer)]
        step, shown = int(checkpoint["global_step"]), self._shows_average
        keeps = bool(fleet_optimizers) and "optimizer_states" in checkpoint  # else only the weights are to be saved
        if keeps and self._is_interrupted():
            keeps = checkpoints.keep_after_an_error(checkpoint, filepath, fleet_optimizers)
        elif keeps:
            checkpoint[checkpoints.KEY] = checkpoints.what_to_keep(fleet_optimizers, step=step)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if keeps and checkpoints.ranks_differ(fleet_optimizers):
            self._show_own()
            checkpoints.save_own(filepath, self.lightning_module, fleet_optimizers, step=step)
            if shown:
                self._show_average()

    def _is_interrupted(self) -> bool:
        """Check for an error, perhaps of this rank alone: then the others would not join a collective."""
        return bool(self.lightning_module.trainer.interrupted)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            checkpoints.remove_own(filepath)
        super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._path = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[no-any-return]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        checkpoints.load_kept(checkpoint, self._path, self.lightning_module, self.optimizers)

    def teardown(self) -> None:
        try:
            self._show_own()
        finally:
            self._release()
        if self._counted is not None:  # restore the user's value: in another fit both would count
            self._counted.accumulate_grad_batches = 1
            self._counted = None
        super().teardown()


def _retain_graph(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Read retain_graph, the only argument of Tensor.backward that is supported here; refuse the others."""
    other = [*map(repr, args), *(name for name, value in kwargs.items() if name != "retain_graph" and value)]
    if other:
        raise ConfigError(f"manual_backward was given {', '.join(other)}; besides the loss it takes retain_graph= alone.")
    return bool(kwargs.get("retain_graph", False))


def _no_minimize(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "in a LightningModule write self.manual_backward(loss), opt.step(), opt.zero_grad() in place of opt.minimize(loss): "
        "Lightning counts its steps there."
    )
