"""Save in Lightning checkpoints what a run needs besides Lightning's own state to continue exactly.

state equal on all ranks    in the .ckpt, under "fleetx" beside Lightning's keys
a rank's own state          (Local SGD, DGC, PowerSGD, a half-full merge window) in a folder beside the file: last.ckpt.fleetx
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..checkpoint import load_checkpoint, save_checkpoint
from ..engine.optimizer import FleetOptimizer
from ..engine.setup.optimizer_state import load_optimizer_state
from ..engine.state import check_training_state, load_training_state, training_state
from ..errors import CheckpointError, FleetError, warn_user

KEY = "fleetx"
FOLDER = ".fleetx"


def folder_of(path: Any) -> str:
    """Return the folder beside the file; where `path` is a link, beside its target."""
    return f"{os.path.realpath(path)}{FOLDER}"


def ranks_differ(optimizers: Sequence[FleetOptimizer]) -> bool:
    """Check whether ranks hold different state; the answer is the same on every rank."""
    pipelines = [optimizer.pipeline for optimizer in optimizers]
    return any(
        p.averages or p.stages.reduce.state_dict() or p.window.micro_steps or p.stages.shard is not None for p in pipelines
    )


def what_to_keep(optimizers: Sequence[FleetOptimizer], *, step: int) -> dict[str, Any]:
    """Return the entry for the .ckpt. It shares its tensors with Lightning's entries, so that they are written once."""
    if ranks_differ(optimizers):
        return {"step": step}
    return {"states": [training_state(optimizer) for optimizer in optimizers]}


def keep_after_an_error(checkpoint: dict[str, Any], path: Any, optimizers: Sequence[FleetOptimizer]) -> bool:
    """Add what this rank can save alone after an error; return whether that is complete."""
    with contextlib.suppress(FleetError):  # the error came in the middle of a step
        if not ranks_differ(optimizers):
            checkpoint[KEY] = what_to_keep(optimizers, step=0)
            return True
    warn_user(
        f"{path} is saved after an error: it holds the weights of rank 0 alone, and none of the strategy's state. "
        "Continue from an earlier checkpoint.",
    )
    return False


def save_own(path: Any, module: nn.Module, optimizers: Sequence[FleetOptimizer], *, step: int) -> None:
    """Save each rank's own state; every rank must call it."""
    if "://" in str(path):
        raise CheckpointError(
            f"{path}: this strategy keeps state of each rank's own, which is written into a folder beside the checkpoint; that "
            "folder must be on a file system that all nodes share. Give ModelCheckpoint(dirpath=...) such a folder."
        )
    save_checkpoint(folder_of(path), step=step, keep=1, model=module, **_by_name(optimizers))


def remove_own(path: Any) -> None:
    shutil.rmtree(folder_of(path), ignore_errors=True)


def load_kept(checkpoint: Mapping[str, Any], path: Any, module: nn.Module, optimizers: Sequence[FleetOptimizer]) -> None:
    """Load optimizers, counters, residuals, and each rank's own weights where ranks differ; every rank must call it."""
    kept = checkpoint.get(KEY)
    if kept is None:
        _load_plain(checkpoint, path, optimizers)
    elif "states" in kept:
        for optimizer, state in zip(optimizers, kept["states"], strict=True):
            check_training_state(optimizer, state)
        for optimizer, state in zip(optimizers, kept["states"], strict=True):
            load_training_state(optimizer, state)
    else:
        _load_own(int(kept["step"]), path, module, optimizers)


def _load_plain(checkpoint: Mapping[str, Any], path: Any, optimizers: Sequence[FleetOptimizer]) -> None:
    for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        load_optimizer_state(optimizer.update, state)
        if optimizer.pipeline.stages.shard is not None:
            optimizer.pipeline.stages.shard.cut_state()
    if optimizers and optimizers[0].pipeline.comm.rank == 0:
        warn_user(
            f"{path} was saved without FleetStrategy: weights and optimizer are loaded, and the strategy begins at its first "
            "update (periods, ramps, loss scale).",
        )


def _load_own(step: int, path: Any, module: nn.Module, optimizers: Sequence[FleetOptimizer]) -> None:
    loaded = load_checkpoint(folder_of(path), model=module, **_by_name(optimizers))
    if loaded is None or loaded.step != step:
        held = "is not there" if loaded is None else f"holds step {loaded.step}"
        raise CheckpointError(
            f"{path} is of step {step}, with each rank's own state beside it in {folder_of(path)}, which {held}. Copy or move "
            "the two together; or start again from the average: Model.load_from_checkpoint(path), and fit without ckpt_path."
        )


def _by_name(optimizers: Sequence[FleetOptimizer]) -> dict[str, Any]:
    return {f"optimizer_{number}": optimizer for number, optimizer in enumerate(optimizers)}
