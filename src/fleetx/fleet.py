"""`fleet`: init, roles, distribute. A thin face; the work is done elsewhere.

fleet.init()
model, optimizer = fleet.distribute(model, optimizer, strategy)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from . import stopping, util, world
from .checkpoint import load_checkpoint, save_checkpoint, save_model
from .compile import check_parts, compile_strategy, require_plain_optimizer
from .errors import ConfigError
from .keys import integer
from .keys import size as size_in_bytes
from .memory.find_batch import FoundBatches, Resize, found_batches, rows_of, size_of, without_memory_parts
from .optimizer import FleetOptimizer
from .patch import restore_forwards
from .placement import (
    agree_on_model,
    broadcast_from_first,
    frozen_parameters,
    move,
    named_trainable,
    refuse_unsuited,
    strip_compiled_prefix,
)
from .rehearsal import Rehearsal, Sample, own_loss
from .sampler import FleetSampler
from .slots import Site
from .strategy import DistributedStrategy
from .takeover import give_back

__all__ = [
    "DistributedStrategy",
    "autocast",
    "barrier_worker",
    "device",
    "distribute",
    "distributed_model",
    "distributed_optimizer",
    "find_batch",
    "init",
    "is_first_worker",
    "is_initialized",
    "load_checkpoint",
    "local_rank",
    "node_num",
    "sampler",
    "save_checkpoint",
    "save_model",
    "should_stop",
    "util",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]

M = TypeVar("M", bound=nn.Module)

_default_strategy: DistributedStrategy | None = None
_with_autocast: weakref.ref[FleetOptimizer] | None = None
"""The last pair that asked for amp. Weak: once it is gone, fleet.autocast() does nothing again."""
_models_waiting: list[weakref.ref[nn.Module]] = []
_optimizers_waiting: list[weakref.ref[FleetOptimizer]] = []


def init(
    role: object = None,
    is_collective: bool = True,
    strategy: DistributedStrategy | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
) -> None:
    """Join the job: an existing process group, or a launcher's variables, or alone. Calling it again joins nothing anew.

    `role` is Fleet's role maker; ranks come from the environment, so any object is accepted. `is_collective=False` would be
    a parameter server, which this library has not.
    """
    if is_collective is not True:
        raise ConfigError(
            f"is_collective is {is_collective!r}: parameter servers are not supported. Write fleet.init(is_collective=True)."
        )
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f"strategy is {type(strategy).__name__}; it must be a fleet.DistributedStrategy.")
    global _default_strategy
    if strategy is not None:
        _default_strategy = strategy.copy()
    world.open_world(backend=backend, timeout=timeout)


def is_initialized() -> bool:
    return world.is_open()


def device() -> torch.device:
    """The device of this rank."""
    return world.current().device


def worker_index() -> int:
    """This process's rank, from 0."""
    return world.current().comm.rank


def worker_num() -> int:
    """How many ranks there are."""
    return world.current().comm.size


def is_first_worker() -> bool:
    return worker_index() == 0


def local_rank() -> int:
    """This process's place on its node, from 0."""
    return world.current().local_rank


def node_num() -> int:
    return world.current().node_num


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """`host:local_rank` of every rank, as a list or joined by commas."""
    endpoints = list(world.current().endpoints)
    return ",".join(endpoints) if to_string else endpoints


def barrier_worker() -> None:
    """Wait until every rank is here."""
    world.current().comm.barrier()


def should_stop() -> bool:
    """Whether a rank was asked to stop (SIGTERM or SIGUSR1): the same answer on every rank, renewed by each update.

    Call it after each step, save, and leave the loop. From the first call on these signals no longer end the process at once.
    """
    stopping.arm()
    comm = world.current().comm
    if comm.size == 1:
        return stopping.is_requested()
    agreed = stopping.was_agreed()
    if agreed is not None:
        return agreed
    # No update carries the request in a job without a pair: ask all ranks here.
    request = torch.tensor([float(stopping.is_requested())], device=comm.control_device)
    comm.all_reduce(request, "max").wait()
    return bool(request > 0)


def sampler(dataset: Sized | int, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> FleetSampler:
    """This rank's share of a dataset: equal counts for training (shuffle), every sample once for evaluation (no shuffle)."""
    comm = world.current().comm
    return FleetSampler(dataset, rank=comm.rank, size=comm.size, shuffle=shuffle, seed=seed, drop_last=drop_last)


def autocast() -> AbstractContextManager[None]:
    """The strategy's autocast, for a loss computed outside the model; without `amp` it does nothing."""
    face = None if _with_autocast is None else _with_autocast()
    context: AbstractContextManager[None] = contextlib.nullcontext() if face is None else face.forward_stage.context()
    return context


def distribute(
    model: M,
    optimizer: Optimizer,
    strategy: DistributedStrategy | None = None,
    *,
    sample: Any = None,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
) -> tuple[M, FleetOptimizer]:
    """Prepare a model and its optimizer in place; the very same module comes back, with an optimizer that drives the strategy.

    `sample` (one batch) and `loss_fn(model, batch)` are for parts that must run steps themselves.
    """
    require_plain_optimizer(optimizer)
    face = FleetOptimizer(optimizer)
    _bind(model, face, _chosen(strategy), sample=sample, loss_fn=loss_fn)
    return model, face


def find_batch(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: DistributedStrategy | None = None,
    *,
    sample: Any,
    budget: int | str,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    global_batch: int | None = None,
    resize: Resize = rows_of,
    size: int | None = None,
) -> FoundBatches:
    """The largest micro-batch that a budget of memory allows, and the fastest one; before `distribute`, on every rank.

    `sample` is a batch, of which others are made by repeating rows, or by `resize(sample, size)`. With `global_batch` the
    micro-batches make it up without a rest. Model and optimizer are afterwards as they were."""
    global _with_autocast
    require_plain_optimizer(optimizer)
    chosen, face = _chosen(strategy), FleetOptimizer(optimizer)
    limit = size_in_bytes().check("budget", budget)
    if global_batch is not None:
        global_batch = integer(1).check("global_batch", global_batch)
    length = size_of(sample) if size is None else integer(2).check("size", size)
    if not callable(resize):
        raise ConfigError(f"resize is {resize!r}; it must be a function: resize(sample, size) gives a batch of that size.")
    with_autocast = _with_autocast
    _bind(model, face, without_memory_parts(chosen), checks=chosen, shows=False, loss_fn=loss_fn)
    try:
        here = world.current()
        rehearsal = _rehearsal(model, face, sample, loss_fn)
        found = found_batches(rehearsal, chosen, budget=limit, resize=resize, size=length, global_batch=global_batch)
    finally:
        _undo(model, face)
        _with_autocast = with_autocast  # of a pair that trains already
    if here.comm.rank == 0:
        print(found, flush=True)
    return found


def distributed_model(model: M) -> M:
    """Fleet's two-call spelling, together with `distributed_optimizer`, in either order."""
    _require_module(model)
    mine = {id(p) for p in model.parameters()}
    for reference in list(_optimizers_waiting):
        face = reference()
        if face is None:
            _optimizers_waiting.remove(reference)
        elif mine & face.parameter_ids():
            _optimizers_waiting.remove(reference)
            _bind(model, face, face.strategy_waiting)
            return model
    _models_waiting.append(weakref.ref(model))
    return model


def distributed_optimizer(optimizer: Optimizer, strategy: DistributedStrategy | None = None) -> FleetOptimizer:
    """Fleet's two-call spelling: the optimizer meets the model that `distributed_model` was or will be given."""
    require_plain_optimizer(optimizer)
    face = FleetOptimizer(optimizer, strategy_waiting=_chosen(strategy))
    check_parts(face.strategy_waiting.parts())
    for reference in list(_models_waiting):
        model = reference()
        if model is None:
            _models_waiting.remove(reference)
        elif face.parameter_ids() & {id(p) for p in model.parameters()}:
            _models_waiting.remove(reference)
            _bind(model, face, face.strategy_waiting)
            return face
    _optimizers_waiting.append(weakref.ref(face))
    return face


_LATER = {"Monitor"}


def __getattr__(name: str) -> Any:
    later = " It is not available yet in this version." if name in _LATER else ""
    raise AttributeError(f"fleet has no attribute `{name}`.{later}")


def _chosen(strategy: DistributedStrategy | None) -> DistributedStrategy:
    """A copy: changing the user's object later changes nothing here."""
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f"strategy is {type(strategy).__name__}; it must be a fleet.DistributedStrategy.")
    return (strategy or _default_strategy or DistributedStrategy()).copy()


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"distribute was given {type(model).__name__} as the model; it takes a torch.nn.Module.")


def _bind(
    model: nn.Module,
    face: FleetOptimizer,
    strategy: DistributedStrategy,
    *,
    sample: Any = None,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    checks: DistributedStrategy | None = None,
    shows: bool = True,
) -> None:
    """What can be refused is refused before the model is touched; parts may still refuse while they are built."""
    global _with_autocast
    _require_module(model)
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn is {loss_fn!r}; it must be a function: loss_fn(model, batch) gives the loss.")
    here = world.current()
    optimizer = face.update
    check_parts(strategy.parts())
    params = named_trainable(model, optimizer)
    refuse_unsuited(model, params)
    agree_on_model(params, model, optimizer, strategy.to_json(), here.comm)
    has_sample = sample is not None or checks is not None
    site = Site(model=model, optimizer=optimizer, params=params, comm=here.comm, device=here.device, has_sample=has_sample)
    for part in (checks or strategy).parts():
        part.check(site)
    restore_forwards(model)
    move(model, optimizer, params, here.device)
    broadcast_from_first(model, params, here.comm)
    strip_compiled_prefix(model)
    compiled = compile_strategy(
        strategy, model=model, optimizer=optimizer, params=params, comm=here.comm.metered(), device=here.device
    )
    face.bind(compiled.pipeline, frozen=frozen_parameters(model))
    if compiled.forward is not None:
        face.forward_stage = compiled.forward
        _with_autocast = weakref.ref(face)
    if shows and here.comm.rank == 0:
        print(strategy, flush=True)
    if sample is not None:
        rehearsal = _rehearsal(model, face, sample, loss_fn)
        try:
            for part in strategy.parts():
                part.rehearse(rehearsal)
        except BaseException:
            _undo(model, face)
            raise


def _rehearsal(
    model: nn.Module, face: FleetOptimizer, sample: Any, loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None
) -> Rehearsal:
    here = world.current()
    return Rehearsal(model, face, loss_fn or own_loss, Sample(sample, here.device), here.comm, here.device)


def _undo(model: nn.Module, face: FleetOptimizer) -> None:
    """The pair is given up: nothing of it may act in the next one."""
    restore_forwards(model)
    face.pipeline.give_up()
    give_back(face.given)
