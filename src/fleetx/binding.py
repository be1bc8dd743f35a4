"""A model, an optimizer and a strategy become a pair that trains; or are given up again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import world
from .buffer_kinds import refuse_unknown_buffers
from .compile import check_parts, compile_strategy
from .errors import ConfigError
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
from .slots import Site
from .strategy import DistributedStrategy
from .takeover import give_back
from .wrapped import bare, refuse_unfit, wrapper_of

LossFn = Callable[[nn.Module, Any], Tensor]


def require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"distribute was given {type(model).__name__} as the model; it takes a torch.nn.Module.")


def require_loss_fn(loss_fn: object) -> None:
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn is {loss_fn!r}; it must be a function: loss_fn(model, batch) gives the loss.")


def bind(
    model: nn.Module,
    face: FleetOptimizer,
    strategy: DistributedStrategy,
    *,
    has_sample: bool = False,
    checks: DistributedStrategy | None = None,
    is_placed: bool = False,
) -> None:
    """What can be refused is refused before the model is touched; parts may still refuse while they are built.

    `checks`: the strategy that is looked at for that, where another one is built. `is_placed`: the model is on its device, and
    the same on all ranks, since an earlier pair was bound to it."""
    require_module(model)
    here = world.current()
    optimizer, whole, wrapper = face.update, model, wrapper_of(model)
    model = bare(whole)  # names, parts and checks are of the module that the user wrote; DDP around it only reduces
    check_parts(strategy.parts(), by_ddp=wrapper is not None)
    params = named_trainable(model, optimizer)
    refuse_unsuited(model, params)
    agree_on_model(params, whole, optimizer, strategy.to_json(), here.comm)
    refuse_unknown_buffers(model, strategy.local_buffers)  # by all ranks: they have the same buffers, and the same strategy
    if wrapper is not None:
        refuse_unfit(wrapper, params, strategy.parts(), here.comm, here.device)
    site = Site(model=model, optimizer=optimizer, params=params, comm=here.comm, device=here.device, has_sample=has_sample)
    for part in (checks or strategy).parts():
        part.check(site)
    restore_forwards(model)
    if not is_placed:
        move(model, optimizer, params, here.device)
        broadcast_from_first(model, params, here.comm)
    strip_compiled_prefix(model)
    compiled = compile_strategy(
        strategy,
        model=model,
        optimizer=optimizer,
        params=params,
        comm=here.comm.metered(),
        device=here.device,
        wrapper=wrapper,
    )
    face.bind(compiled.pipeline, frozen=frozen_parameters(model))
    face.forward_stage = compiled.forward


def rehearse(model: nn.Module, face: FleetOptimizer, strategy: DistributedStrategy, rehearsal: Rehearsal) -> None:
    """Let each part run the steps that it needs to settle itself."""
    try:
        for part in strategy.parts():
            part.rehearse(rehearsal)
    except BaseException:
        give_up(model, face)
        raise


def rehearsal_of(model: nn.Module, face: FleetOptimizer, sample: Any, loss_fn: LossFn | None) -> Rehearsal:
    here = world.current()
    return Rehearsal(model, face, loss_fn or own_loss, Sample(sample, here.device), here.comm, here.device)


def give_up(model: nn.Module, face: FleetOptimizer) -> None:
    """Nothing of this pair may act in the next one."""
    restore_forwards(model)
    face.pipeline.give_up()
    if face.update is not face.given:
        face.given.state = face.update.state  # what was put back was put back into the one that stood in its place
    give_back(face.given)
