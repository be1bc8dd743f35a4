"""Save and load verified checkpoints, and continue bit-identically. Safetensors and JSON: loading runs no code from the files."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from ..config import log
from ..dist import heartbeat, world
from ..dist.agree import ranks_where, run_on_all
from ..dist.comm import Comm
from ..dist.heartbeat import Phase
from ..engine.optimizer import FleetOptimizer
from ..engine.state import shares_collected
from ..engine.user_loop.model_pairs import owner_of
from ..errors import CheckpointError, ConfigError, warn_user
from .folder import newest_first, step_of
from .load import LOOKS, Loaded, Vanished, find, load_into
from .save import Saving, on_first, write_checkpoint, write_model
from .snapshot import take_share, whole_weights

__all__ = ["Loaded", "Saving", "load_checkpoint", "save_checkpoint", "save_model"]

_last: Saving | None = None
"""Latest background save, perhaps still running; None after it was waited for."""
_known: set[Path] = set()
"""Directories that load_checkpoint has read, or for which the warning about later steps was given."""
_background: tuple[Comm, Comm] | None = None
"""The world's communicator and the group made from it for background saves; None before the first."""


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    step: int,
    keep: int = 3,
    async_save: bool = False,
    on_save_error: str = "raise",
    **objects: Any,
) -> Saving:
    """Save models, optimizers, schedulers, samplers, EMA copies and plain values by name. Every rank must call it.

    The newest `keep` checkpoints stay. With `async_save` the state is copied and written in the background; an error there is
    raised by the next save, by load_checkpoint, or by `.wait()` on the returned object. With `on_save_error="warn"` storage
    that fails (a full disk) is a warning on rank 0, and training goes on; `.wait()` and `.error` still tell.

    Examples:
        >>> model, optimizer = fleet.distribute(model, optimizer)
        >>> saving = fleet.save_checkpoint("checkpoints", step=1, model=model, optimizer=optimizer)
    """
    _check_save(directory, step, keep, objects)
    if on_save_error not in ("raise", "warn"):
        raise ConfigError(f'save_checkpoint: on_save_error is {on_save_error!r}; it must be "raise" or "warn".')
    warns = on_save_error == "warn"
    here = world.current()
    path = Path(os.path.abspath(directory))  # absolute: the script may change its directory during a background save
    with heartbeat.during(Phase.SAVE):
        _finish_last(here.comm)
        with shares_collected(objects.values()):
            share = take_share(objects, here.comm, here.device, copies=async_save)
        comm = _background_comm(here.comm) if async_save else here.comm

        def write() -> Path:
            return write_checkpoint(share, path, step=step, keep=keep, comm=comm, warns=warns)

        saving = Saving(write, in_background=async_save, warns=warns)
    global _last
    _last = saving if async_save else None
    if here.comm.rank == 0:  # after the last collective: the user may turn warnings into errors
        _warn_of_failure(None if async_save else saving.error)
        _warn_of_later_steps(path, step)
    return saving


def load_checkpoint(directory: str | os.PathLike[str], *, new_world_size: bool = False, **objects: Any) -> Loaded | None:
    """Load the newest checkpoint that verifies completely; return None if the directory holds none. Every rank must call it.

    Random number generators are restored too. `new_world_size` allows loading on a different number of ranks than saved it, which
    is not bit-identical: added ranks get new random number streams.

    Examples:
        >>> model, optimizer = fleet.distribute(model, optimizer)
        >>> saving = fleet.save_checkpoint("checkpoints", step=1, model=model, optimizer=optimizer)
        >>> fleet.load_checkpoint("checkpoints", model=model, optimizer=optimizer).step
        1
    """
    here = world.current()
    _finish_last(here.comm)
    path = Path(os.path.abspath(directory))
    _known.add(path)
    for _ in range(LOOKS):
        found = find(path, here.comm)
        if found is None:
            return None
        try:
            return load_into(found, objects, here.comm, here.device, new_world_size=new_world_size)
        except Vanished as gone:  # on all ranks: the run that writes there has deleted it meanwhile
            vanished = gone
    raise CheckpointError(str(vanished))


def save_model(path: str | os.PathLike[str], model: nn.Module, optimizer: FleetOptimizer | None = None) -> None:
    """Write the model as one safetensors file with the keys of its state dict. Every rank must call it; rank 0 writes.

    With an optimizer, an incomplete merge window is applied first (`flush`), and under Local SGD the average is written.

    Examples:
        >>> model, optimizer = fleet.distribute(model, optimizer)
        >>> fleet.save_model("model.safetensors", model, optimizer)
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"save_model was given {type(model).__name__} as the model; write save_model(path, model, optimizer).")
    if optimizer is not None and not isinstance(optimizer, FleetOptimizer):
        raise ConfigError(
            f"save_model was given {type(optimizer).__name__} as the optimizer; "
            "give the one that fleet.distribute(...) returned, or none."
        )
    comm = world.current().comm
    _refuse_own_weights(model, optimizer, comm)
    if optimizer is None:
        return _write_on_first(model, Path(path), comm)
    optimizer.flush()
    with optimizer.averaged():
        _write_on_first(model, Path(path), comm)


def _write_on_first(model: nn.Module, path: Path, comm: Comm) -> None:
    whole = whole_weights({"": model}).get("", {})  # on every rank: rank 0 alone would wait for the others
    on_first(comm, lambda: write_model(model, path, whole))


def _refuse_own_weights(model: nn.Module, optimizer: FleetOptimizer | None, comm: Comm) -> None:
    """Raise under Local SGD without its optimizer: rank 0 would write its own weights instead of the average."""
    mine = None if optimizer is None else optimizer.pipeline
    owners = [owner_of(param) for param in model.parameters()]
    alone = any(owner is not None and owner is not mine and owner.averages for owner in owners)
    if ranks_where(comm, alone):  # gathered: a discarded optimizer may be collected on some ranks only
        raise ConfigError(
            "under Local SGD each rank has weights of its own, and save_model writes their average. "
            "Give it the optimizer that trains this model: fleet.save_model(path, model, optimizer), one model at a time."
        )


def _check_save(directory: object, step: object, keep: object, objects: dict[str, Any]) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"save_checkpoint: {name} is {value!r}; it must be an integer of at least {least}.")
    if not isinstance(directory, (str, os.PathLike)):
        raise ConfigError(f"save_checkpoint: the directory is {directory!r}; it must be a path.")
    if not objects:
        raise ConfigError("save_checkpoint was given nothing to save. Write save_checkpoint(dir, step=step, model=model, ...).")


def _warn_of_later_steps(directory: Path, step: int) -> None:
    """Warn when a new run saves into the directory of an older, longer run: it would later resume from that run's checkpoints."""
    later = [name for name in newest_first(directory) if (step_of(name) or 0) > step] if directory not in _known else []
    if later:
        _known.add(directory)
        warn_user(
            f"{directory} holds {later[0]}, later than the step {step} that is saved now: load_checkpoint would take that one. "
            "Give each run its own directory, or delete the checkpoints you do not want.",
        )


def _warn_of_failure(error: Exception | None) -> None:
    if error is not None:
        warn_user(f"a checkpoint was not saved: {error} Training goes on without it.")


def _finish_last(comm: Comm) -> None:
    """Wait for the background save. All ranks raise if its error was not yet raised on any one of them."""
    global _last
    last, _last = _last, None
    error = None if last is None else last.take_error()
    # The same on all ranks: the error of storage that fails is agreed, and so is what is made of it.
    is_warned = last is not None and last.warns and isinstance(error, CheckpointError) and error.storage_code is not None

    def finish() -> None:
        if error is not None and not is_warned:
            raise error

    run_on_all(comm, finish, report=str, fails=lambda failures: CheckpointError(failures.first[1]))
    if is_warned and comm.rank == 0:
        _warn_of_failure(error)


@atexit.register
def _print_last_error() -> None:
    """Print the error of a last background save that the script did not wait for. Python joins its thread first."""
    global _last, _background
    error = None if _last is None else _last.take_error()
    if error is not None:
        log.say(f"fleetx: the last checkpoint was not saved: {error}", logging.ERROR, stream=sys.stderr)
    # These hold a group that the script has closed. Its threads must end now: one that releases a tensor while the interpreter
    # shuts down aborts the process ("terminate called without an active exception").
    _last = _background = None


def _background_comm(comm: Comm) -> Comm:
    global _background
    if _background is None or _background[0] is not comm:
        _background = (comm, comm.background())
    return _background[1]
