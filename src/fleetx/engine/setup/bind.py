"""A model, an optimizer and a strategy become a pair that trains; or are given up again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...dist import world
from ...dist.agree import ranks_where
from ...dist.comm import Comm
from ...dist.fully_sharded import is_fully_sharded
from ...errors import ConfigError, warn_user
from ..buffers.buffer_kinds import refuse_unknown_buffers
from ..dry_run import Rehearsal, Sample, own_loss
from ..modules.large_head import advice_on_head
from ..modules.patching import restore_forwards
from ..optimizer import FleetOptimizer, watch_steps
from ..slots import Part, Site, Slot
from ..state import common_buffers, counters, load_common_buffers, load_counters
from ..step import Pipeline
from ..user_loop import model_pairs, user_grad_scaler
from ..user_loop.ddp import bare, refuse_unfit, wrapper_of
from ..user_loop.optimizer_hooks import stop_routing
from ..user_loop.other_steps import part_in_step, refuse_past, refuse_unreduced
from .build import compile_strategy
from .conflicts import check_parts
from .keep_alive import keep_with, let_go
from .optimizer_state import give_whole_state_back
from .optimizer_swap import give_back, mark_state, require_own_state
from .placement import (
    OUTSIDE,
    agree_on_model,
    broadcast_from_first,
    broadcast_tensors,
    frozen_parameters,
    move,
    named_trainable,
    plain_name,
    refuse_unsuited,
    strip_compiled_prefix,
    warn_of_other_modules,
    warn_of_unowned_gradients,
)
from .strategy_record import record

if TYPE_CHECKING:
    from ...strategy import DistributedStrategy

LossFn = Callable[[nn.Module, Any], Tensor]

_in_forward: weakref.WeakKeyDictionary[Pipeline, tuple[weakref.ref[nn.Module], list[Part]]] = weakref.WeakKeyDictionary()
"""The model of each pair, and what its strategy does in the model's forward."""


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
    """Bind a model to its optimizer. What can be refused is refused before the model is touched; parts may still refuse while
    they are built.

    `checks`: the strategy that is looked at for that, where another one is built. `is_placed`: the model is on its device, and
    the same on all ranks, since an earlier pair was bound to it."""
    require_module(model)
    here = world.current()
    give_whole_state_back(face.update)
    optimizer, whole, wrapper = face.update, model, wrapper_of(model)
    model = bare(whole)  # names, parts and checks are of the module that the user wrote; DDP around it only reduces
    parts = strategy.parts()
    check_parts(parts, by_ddp=wrapper is not None)
    params = named_trainable(model, optimizer)
    refuse_unsuited(model, params)
    agree_on_model(params, whole, optimizer, strategy.to_json(), here.comm)
    refuse_unknown_buffers(model, strategy.local_buffers)  # by all ranks: they have the same buffers, and the same strategy
    if wrapper is not None:
        refuse_unfit(wrapper, params, parts, here.comm, here.device)
    checked = parts if checks is None else checks.parts()
    site = Site(
        model=model,
        optimizer=optimizer,
        params=params,
        comm=here.comm,
        device=here.device,
        has_sample=has_sample,
        parts=checked,
    )
    require_own_state(optimizer, checked)  # on all ranks: they have ended the same pair
    for part in checked:
        part.check(site)
    _refuse_beside_shards(parts, here.comm, divides=is_fully_sharded(model))
    acting = _forward_parts(parts)
    _refuse_unlike_forward(model, acting)
    restore_forwards(model)
    if not is_placed:
        move(model, optimizer, params, here.device)
        broadcast_from_first(model, params, here.comm)
    strip_compiled_prefix(model)
    for part in parts:
        part.place(site)
    params = named_trainable(model, optimizer)
    compiled = compile_strategy(
        strategy,
        parts,
        model=model,
        optimizer=optimizer,
        params=params,
        comm=here.comm.metered(),
        device=here.device,
        wrapper=wrapper,
    )
    face.bind(compiled.pipeline, frozen=frozen_parameters(model))
    face.forward_stage = compiled.forward
    face.strategy_record = record(strategy.to_dict(), parts, asked=face.asked_of_auto)
    keep_with(model, face)
    watch_steps()
    user_grad_scaler.watch()
    _in_forward[face.pipeline] = (weakref.ref(model), acting)
    _connect(whole, face, strategy, parts, params)
    if not is_placed:
        warn_of_other_modules(params, here.comm, syncs_batch_norm=strategy.sync_batch_norm)


def _refuse_beside_shards(parts: Sequence[Part], comm: Comm, *, divides: bool) -> None:
    """Raise where one of several pairs has its weights divided (fully_shard): a backward of one loss could not leave the other's
    gradients alone. All ranks raise or none: a discarded pair may be collected on some of them only."""
    others = [pipeline for pipeline in model_pairs.alive if isinstance(pipeline, Pipeline)]
    divides = divides or any(part.divides_weights for part in parts)
    unfit = bool(others) and (divides or any(pipeline.holds_weight_shards for pipeline in others))
    if ranks_where(comm, unfit):
        raise ConfigError(
            "strategy.sharding of stage 3 (fully_shard) trains one pair of model and optimizer in a process, and there is "
            "another one: a loss that reaches both models would leave gradients in the one that it is not for. Give both to "
            "fleet.distribute as one, in a torch.nn.ModuleList; or use stage 1 or 2."
        )


def _forward_parts(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.claims() & {Slot.MODULE, Slot.FORWARD} or part.changes_forward]


def _refuse_unlike_forward(model: nn.Module, mine: Sequence[Part]) -> None:
    """Raise where two optimizers of one model would have different forwards: a part that acts there acts for both, or for
    none."""
    modules = set(model.modules())
    for pipeline, (held, theirs) in list(_in_forward.items()):
        other = held()
        if model_pairs.is_alive(pipeline) and other is not None and theirs != mine and not modules.isdisjoint(other.modules()):
            names = " and ".join(
                ", ".join(f"`{part.name}`" for part in parts) if parts else "none of them" for parts in (theirs, mine)
            )
            shared = next(name for name, module in model.named_modules() if module in set(other.modules()))
            what = f"`{shared}` of this model is in another distributed one" if shared else "this model has another optimizer"
            raise ConfigError(
                f"{what} already, under a strategy with other settings of what acts in its forward "
                f"(amp, compile, recompute, sync_batch_norm): {names}. Give both strategies the same."
            )


def _connect(
    model: nn.Module,
    face: FleetOptimizer,
    strategy: DistributedStrategy,
    parts: Sequence[Part],
    params: Mapping[str, nn.Parameter],
) -> None:
    """Let the pair end, follow new parameters and explain missing gradients; by weak references, so that it can be discarded."""
    model_of, face_of, chosen = weakref.ref(model), weakref.ref(face), strategy.copy()
    ids = {name: id(param) for name, param in params.items()}
    face_comm = face.pipeline.comm

    def end(why: str) -> None:
        held, optimizer = model_of(), face_of()
        if held is not None and optimizer is not None:
            end_pair(held, optimizer, why)

    def follow() -> None:
        held, optimizer = model_of(), face_of()
        if held is not None and optimizer is not None:
            lay_out_again(held, optimizer, chosen)

    def follow_in_backward() -> None:
        follow()
        optimizer = face_of()
        if optimizer is not None:
            optimizer.pipeline.take_local_gradients()

    def warn() -> None:
        held = model_of()
        if held is not None:
            warn_of_unowned_gradients(bare(held), face_comm)

    def advise() -> str:
        held = model_of()
        return "" if held is None else advice_on_head(bare(held))

    def hint() -> str:
        held = model_of()
        optimizer = face_of()
        holds = set() if optimizer is None else optimizer.parameter_ids()
        return "" if held is None else replaced_parameter(bare(held), ids, holds)

    part = part_in_step(parts, on_nan_inf=strategy.on_nan_inf)

    pipeline = face.pipeline
    own = pipeline.param_ids
    pipeline.refuse_past_parts = lambda optimizer: refuse_past(part, optimizer)
    pipeline.look_for_unreduced = lambda optimizer: refuse_unreduced(model_of(), optimizer, own)
    pipeline.when_ended, pipeline.when_stale, face.follow = end, follow_in_backward, follow
    pipeline.warn_of_unowned = warn
    pipeline.advise_on_memory = advise
    pipeline.hint_at_missing(hint)


def replaced_parameter(model: nn.Module, ids: Mapping[str, int], held: Collection[int]) -> str:
    """Return a sentence on a parameter of the model that is not the tensor which was distributed; empty if all are.

    `ids`: of those that were distributed, by name. `held`: of those that the optimizer holds now."""
    found = {plain_name(name): id(param) for name, param in model.named_parameters()}
    for name, known in ids.items():
        if name not in found and known not in found.values() and not name.startswith(OUTSIDE):
            return (
                f" `{name}` is no parameter of the model any more: it was parametrized (weight_norm, pruning) or taken out after "
                "fleet.distribute(...). Do so first, then build the optimizer and call fleet.distribute(...)."
            )
        if found.get(name, known) != known and found[name] in held:
            return (
                f" `{name}` was replaced, in the model and in the optimizer, after its gradients were laid out. Replace it "
                "between two updates, or call fleet.distribute(...) again."
            )
        if found.get(name, known) != known:
            return (
                f" `{name}` of the model is no longer the tensor that the optimizer holds: "
                "load_state_dict(assign=True) or an assignment has replaced it. Load with assign=False; put the new tensor into "
                "the optimizer's group too; or load first, then build the optimizer and call fleet.distribute(...)."
            )
    return ""


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
    """Undo what this pair has attached to the model, so that nothing of it acts in the next one."""
    restore_forwards(model)
    let_go(face)
    face.pipeline.give_up()
    if face.update is not face.given:
        face.given.state = face.update.state  # what was put back was put back into the one that stood in its place
        mark_state(face.given, face.update)
    give_back(face.given)
    stop_routing(face.given)
    face.end("this pair was given up, and trains nothing any more. Call fleet.distribute(...) again.")


def end_pair(model: nn.Module, face: FleetOptimizer, why: str) -> None:
    """End a pair whose model is distributed again: the optimizer's state stays, gradients go."""
    pipeline = face.pipeline
    pipeline.settle()
    pipeline.outcomes.learn()
    if pipeline.window.micro_steps and not pipeline.window.shared and pipeline.comm.rank == 0:
        warn_user(
            f"fleet.distribute(...) has ended a pair with {pipeline.window.micro_steps} micro-batches that made no update yet; "
            "their gradients are dropped.",
        )
    give_up(model, face)
    pipeline.buckets.release()
    face.end(why)


def lay_out_again(model: nn.Module, face: FleetOptimizer, strategy: DistributedStrategy) -> None:
    """Make new buckets for parameters that were added, replaced or unfrozen, between two updates; every rank is here, or comes.

    A rank that has added none stays in its backward, where it waits for the others' gradients: it is named (`meet`).
    Weights, the optimizer's state, counters, loss scale and statistics go on as they are."""
    old = face.pipeline
    old.comm.wait_for_all(
        f"fleetx/layout/{old.report_builder.pair}/{old.index}/{len(face.parameter_ids())}",
        missing="added or unfroze no parameters before this update, as this rank did, nor replaced any. "
        "Do it on every rank at the same place.",
    )
    _refuse_fixed_layout(face)
    old.outcomes.settle()
    state = {"counters": counters(old), "backward": old.stages.backward.state_dict(), "noise": old.meter.state_dict()}
    common, number, known = common_buffers(old), old.report_builder.pair, old.param_ids
    if not old.buckets.touched() and not old.bare.was_reached:
        old.buckets.release()  # the last update's gradients; those of a backward that is just over stay
    give_up(model, face)
    face.update, face.ended = face.given, ""
    bind(model, face, strategy, is_placed=True)
    new = face.pipeline
    here = world.current()
    new_params = [p for bucket in new.buckets for p in bucket.params if id(p) not in known]
    broadcast_tensors([p.data for p in new_params], here.comm)
    new.report_builder.pair = number
    load_counters(new, state["counters"])
    new.stages.backward.load_state_dict(state["backward"])
    new.meter.load_state_dict(state["noise"], here.device)
    load_common_buffers(new, common, None)


def _refuse_fixed_layout(face: FleetOptimizer) -> None:
    """Name what keeps a number for each parameter of the old layout, and cannot go on with another."""
    pipeline = face.pipeline
    again = "Call fleet.distribute(model, optimizer, strategy) again instead, which begins a new pair with the same weights."
    if pipeline.window.micro_steps:
        raise ConfigError(
            "parameters were added, replaced or unfrozen inside a merge window. Do it between two updates: when report.due."
        )
    if face.memory_plan is not None or face.plan is not None:
        raise ConfigError(
            f"parameters were added, replaced or unfrozen after recompute's budget or auto was planned without them. {again}"
        )
    if pipeline.stages.shard is not None:
        raise ConfigError(
            "parameters were added, replaced or unfrozen under strategy.sharding, which has divided the optimizer's state "
            f"between the ranks without them. {again}"
        )
    if pipeline.stages.reduce.keeps_state() or pipeline.trains_alone:
        raise ConfigError(
            "parameters were added, replaced or unfrozen while the strategy keeps state of the others: what a compressor has "
            f"not sent yet, or the last average of Local SGD. {again}"
        )
