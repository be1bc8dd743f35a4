"""What a Lightning checkpoint must hold besides Lightning's own, so that a run goes on exactly.

state equal on all ranks    beside Lightning's keys in the .ckpt, under "fleetx"
a rank's own state          (Local SGD, DGC, PowerSGD, a merge window half full) in a folder beside it: last.ckpt.fleetx
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
from ..engine.optimizer_state import load_optimizer_state
from ..engine.state import check_training_state, load_training_state, training_state
from ..errors import CheckpointError, FleetError, warn_user

KEY = "fleetx"
FOLDER = ".fleetx"


def folder_of(path: Any) -> str:
    """Beside the file itself, where `path` is a link to it."""
    return f"{os.path.realpath(path)}{FOLDER}"


def ranks_differ(optimizers: Sequence[FleetOptimizer]) -> bool:
    """The same answer on every rank."""
    pipelines = [optimizer.pipeline for optimizer in optimizers]
    return any(p.averages or p.stages.reduce.state_dict() or p.window.micro_steps for p in pipelines)


def what_to_keep(optimizers: Sequence[FleetOptimizer], *, step: int) -> dict[str, Any]:
    """For the .ckpt. Tensors are live, and Lightning's own entries hold the same ones: they are written once."""
    if ranks_differ(optimizers):
        return {"step": step}
    return {"states": [training_state(optimizer) for optimizer in optimizers]}


def keep_after_an_error(checkpoint: dict[str, Any], path: Any, optimizers: Sequence[FleetOptimizer]) -> bool:
    """As much as this rank can say alone; whether that is all there is to keep."""
    with contextlib.suppress(FleetError):  # the error came in the middle of a step
        if not ranks_differ(optimizers):
            checkpoint[KEY] = what_to_keep(optimizers, step=0)
            return True
    warn_user(
        f"{path} is saved after an error: it holds the weights of rank 0 alone, and nothing of what the strategy remembers. "
        "Go on from a checkpoint that was saved before.",
    )
    return False


def save_own(path: Any, module: nn.Module, optimizers: Sequence[FleetOptimizer], *, step: int) -> None:
    """Each rank's own state. Every rank calls it."""
    if "://" in str(path):
        raise CheckpointError(
            f"{path}: this strategy keeps state of each rank's own, which is written into a folder beside the checkpoint; that "
            "folder must be on a file system that all nodes share. Give ModelCheckpoint(dirpath=...) such a folder."
        )
    save_checkpoint(folder_of(path), step=step, keep=1, model=module, **_by_name(optimizers))


def remove_own(path: Any) -> None:
    shutil.rmtree(folder_of(path), ignore_errors=True)


def load_kept(checkpoint: Mapping[str, Any], path: Any, module: nn.Module, optimizers: Sequence[FleetOptimizer]) -> None:
    """Optimizers, counters, residuals; and where ranks differ each rank's own weights. Every rank calls it."""
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
    if optimizers and optimizers[0].pipeline.comm.rank == 0:
        warn_user(
            f"{path} was saved without FleetStrategy: weights and optimizer are loaded, and the strategy begins at its first "
            "update (periods, ramps, loss scale).",
        )


def _load_own(step: int, path: Any, module: nn.Module, optimizers: Sequence[FleetOptimizer]) -> None:
    found = load_checkpoint(folder_of(path), model=module, **_by_name(optimizers))
    if found is None or found.step != step:
        held = "is not there" if found is None else f"holds step {found.step}"
        raise CheckpointError(
            f"{path} is of step {step}, with each rank's own state beside it in {folder_of(path)}, which {held}. Copy or move "
            "the two together; or start anew from the average: Model.load_from_checkpoint(path), and fit without ckpt_path."
        )


def _by_name(optimizers: Sequence[FleetOptimizer]) -> dict[str, Any]:
    return {f"optimizer_{number}": optimizer for number, optimizer in enumerate(optimizers)}
