"""Train in Hugging Face's Trainer by a FleetX strategy: FleetTrainer(..., fleet_strategy=...); the rest stays unchanged.

accelerator    Trainer's own, changed into fleetx.integrations.accelerate.Accelerator: no DDP around the model
accumulation   gradient_accumulation_steps=k and strategy.gradient_merge of k are the same; Trainer divides losses, by tokens
               where it knows them, and a short window at the end of an epoch closes by itself
clipping       max_grad_norm clips true gradients, under Local SGD each rank's own; not beside clip_norm or dgc
files          save_model writes the average under Local SGD (every rank calls it); a checkpoint has a folder `fleetx` beside
               Trainer's files, from which resume_from_checkpoint goes on
evaluation     of the average under Local SGD; after train() the model is the average, on all ranks

Private in transformers, but used: Trainer._save_optimizer_and_scheduler, Trainer._load_optimizer_and_scheduler,
Trainer._load_best_model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import fleet
from ..errors import ConfigError
from ..strategy import DistributedStrategy
from . import require_package, require_seams
from .accelerate import Accelerator
from .accelerate_optimizer import merged
from .lean_head import lean as lean
from .refusals import refuse_divided_weights, refuse_plans, refuse_second_clipping

transformers: Any = require_package("transformers", extra="hf", oldest=(4, 50))
PlainTrainer: Any = transformers.Trainer
SEAMS = ("create_accelerator_and_postprocess", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")
require_seams(PlainTrainer, (*SEAMS, "_load_best_model", "save_model", "evaluate", "predict", "train"))

REFUSED = {
    "fp16": 'write strategy.amp = True; strategy.amp_configs = {"dtype": "float16"}',
    "bf16": 'write strategy.amp = True; strategy.amp_configs = {"dtype": "bfloat16"}',
    "ddp_bucket_cap_mb": "there is no DDP here; write strategy.fuse_grad_size_in_MB",
    "ddp_broadcast_buffers": "there is no DDP here; buffers are averaged with each update",
    "ddp_static_graph": "there is no DDP here",
    "auto_find_batch_size": "a batch that does not fit on one rank leaves the others waiting; fleet.find_batch(...) finds one",
    "deepspeed": "it shards the model itself",
    "fsdp": "it shards the model itself",
}
"""Fields of TrainingArguments that would have no effect, and what to write instead."""


def refuse_arguments(arguments: Any) -> None:
    """Refuse all unsupported TrainingArguments at once."""
    asked = [name for name in REFUSED if getattr(arguments, name, None) not in (None, "", [])]
    asked = [name for name in asked if getattr(arguments, name) or name == "ddp_broadcast_buffers"]  # False asks for something
    if asked:
        reasons = "; ".join(f"{name}: {REFUSED[name]}" for name in asked)
        raise ConfigError(f"FleetTrainer does not take these of TrainingArguments. {reasons}.")
    if getattr(arguments, "n_gpu", 1) > 1:
        raise ConfigError(
            "one process sees several GPUs, and Trainer would use DataParallel. Start with fleetrun: one rank each."
        )


def refuse_default_clipping(arguments: Any, strategy: DistributedStrategy) -> None:
    """Refuse Trainer's clipping, which is on by default, beside a part that clips."""
    norm = arguments.max_grad_norm
    if norm is not None and norm > 0:
        said = f"TrainingArguments(max_grad_norm={norm}), where 1.0 is Trainer's default,"
        refuse_second_clipping(strategy, said, write="Write TrainingArguments(max_grad_norm=0).")


def window_of(arguments: Any, strategy: DistributedStrategy) -> int:
    """Return the micro-batches of one update, by Trainer's setting or the strategy's; if both are set they must agree."""
    theirs = int(arguments.gradient_accumulation_steps)
    if not strategy.gradient_merge:
        return theirs
    ours = strategy.gradient_merge_configs
    if not ours["avg"]:
        raise ConfigError('gradient_merge_configs["avg"] is False, and Trainer divides losses by their number. Leave it out.')
    if theirs not in (1, ours["k_steps"]):
        raise ConfigError(
            f"gradient_accumulation_steps={theirs} and strategy.gradient_merge with k_steps={ours['k_steps']} differ; both say "
            "how many micro-batches make one update. Keep one of them."
        )
    return int(ours["k_steps"])


class FleetTrainer(PlainTrainer):  # type: ignore[misc]
    """transformers.Trainer with one more keyword, `fleet_strategy`."""

    args: Any
    accelerator: Any

    def __init__(self, *args: Any, fleet_strategy: DistributedStrategy | None = None, **kwargs: Any) -> None:
        if fleet_strategy is not None and not isinstance(fleet_strategy, DistributedStrategy):
            raise ConfigError(f"fleet_strategy is {type(fleet_strategy).__name__}; it must be a fleet.DistributedStrategy.")
        self._asked, self._is_averaged = fleet_strategy, False
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        strategy = fleet._chosen(self._asked)
        refuse_plans(strategy, who="FleetTrainer")
        refuse_divided_weights(strategy, who="FleetTrainer")
        refuse_default_clipping(self.args, strategy)
        window = window_of(self.args, strategy)
        strategy.gradient_merge = False  # `window` holds it from here on
        if window != self.args.gradient_accumulation_steps:
            self.args = copy.copy(self.args)  # the user's own stay unchanged; updates and schedules are counted by these
            self.args.gradient_accumulation_steps = window
        super().create_accelerator_and_postprocess()
        # As Trainer sets it for DDP: on, unless the model recomputes or the user sets it.
        handler = getattr(self.accelerator, "ddp_handler", None)
        strategy.find_unused_parameters |= bool(getattr(handler, "find_unused_parameters", False))
        strategy = merged(strategy, window, said="gradient_accumulation_steps")
        self.accelerator = Accelerator.of(self.accelerator, strategy, window=window)

    @contextlib.contextmanager
    def _average_shown(self) -> Iterator[None]:
        """Show the average inside, under Local SGD; every rank must enter it."""
        with self.accelerator.averaged():
            yield

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, then average. After an error nothing is averaged, because only this rank may have failed."""
        self._is_averaged = False
        result = super().train(*args, **kwargs)
        if not self._is_averaged:
            self._average_for_good()
        return result

    def _load_best_model(self) -> None:
        """Load the best weights over the average, which stays for weights that the file lacks or that cannot be read."""
        self._average_for_good()
        self._is_averaged = True
        super()._load_best_model()

    def _average_for_good(self) -> None:
        for ours in self.accelerator.pairs:
            ours.drop_half_window()  # a callback may have stopped inside one
            ours.end_with_average()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._average_shown():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._average_shown():
            return super().predict(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, under Local SGD the average; every rank must call it, rank 0 writes."""
        with self._average_shown():
            super().save_model(output_dir, _internal_call=_internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with contextlib.ExitStack() as gathered:  # rank 0 alone asks for the optimizer's state, of which each may have a share
            for ours in self.accelerator.pairs:
                gathered.enter_context(ours.optimizer.state_gathered())
            super()._save_optimizer_and_scheduler(output_dir)
        self.accelerator.save_strategy_state(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.accelerator.load_strategy_state(Path(checkpoint))
