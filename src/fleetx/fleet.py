"""`fleet`: init, roles, distribute. A thin face; the work is done elsewhere.

fleet.init()
model, optimizer = fleet.distribute(model, optimizer, strategy)
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import weakref
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from . import __version__
from .config import log
from .config.kinds import integer
from .config.kinds import size as size_in_bytes
from .data.sampler import FleetSampler
from .dist import heartbeat, stop_signal, util, world
from .dist.fully_sharded import is_fully_sharded
from .engine import memory_advice
from .engine.modules import current_autocast
from .engine.modules.random_states import NUMPY, PYTHON, torch_sources
from .engine.optimizer import FleetOptimizer
from .engine.setup import registry
from .engine.setup.bind import LossFn, bind, give_up, rehearsal_of, rehearse, require_loss_fn, require_module
from .engine.setup.build import require_plain_optimizer
from .engine.setup.conflicts import check_parts
from .engine.setup.placement import agree_on_model, named_trainable
from .engine.setup.strategy_tables import one_line, without_effect
from .engine.slots import Part
from .engine.user_loop import model_pairs
from .engine.user_loop.ddp import bare, refuse_steps_of_a_sample
from .engine.user_loop.no_sync import leave_local
from .errors import ConfigError, did_you_mean, first_line
from .strategies.auto import Auto
from .strategy import SCALARS, DistributedStrategy

if TYPE_CHECKING:  # imported where they are used: few scripts plan, not all save, and `import fleetx` must be quick
    from .checkpoint import load_checkpoint, save_checkpoint, save_model
    from .monitor import Monitor
    from .recompute.find_batch import FoundBatches, Resize

__all__ = [
    "DistributedStrategy",
    "Monitor",
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
    "no_sync",
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

_HOMES = {
    "Monitor": ".monitor",
    "load_checkpoint": ".checkpoint",
    "save_checkpoint": ".checkpoint",
    "save_model": ".checkpoint",
}
ELSEWHERE = {
    "rank": "worker_index()",
    "get_rank": "worker_index()",
    "world_size": "worker_num()",
    "get_world_size": "worker_num()",
    "barrier": "barrier_worker()",
    "all_reduce": "util.all_reduce(value)",
    "all_gather": "util.all_gather(value)",
    "print": "util.print_on_rank(message)",
    "is_main_process": "is_first_worker()",
    "prepare": "distribute(model, optimizer, strategy)",
    "save": "save_checkpoint(folder, step=..., model=model, optimizer=optimizer)",
    "load": "load_checkpoint(folder, model=model, optimizer=optimizer)",
}
"""What torch and other libraries call the functions of this module."""
_has_said_run = False
"""Whether the line about the run was shown; again after the world was closed."""
_default_strategy: DistributedStrategy | None = None


class _Waiting:
    """A model without a pair that the script believes to be distributed: a backward of it would be each rank's own, silently."""

    def __init__(self, model: nn.Module, why: str) -> None:
        self.model = weakref.ref(model)
        self.why = why
        self._handles = [p.register_post_accumulate_grad_hook(self._refuse) for p in model.parameters() if p.requires_grad]

    def _refuse(self, _: torch.Tensor) -> None:
        if is_initialized() and worker_num() > 1:
            raise ConfigError(self.why)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


NO_OPTIMIZER_YET = (
    "fleet.distributed_model(model) has met no optimizer yet, so that each rank would train by itself. Call "
    "fleet.distributed_optimizer(optimizer, strategy) before the first backward, or use fleet.distribute(...)."
)
PAIR_HAS_ENDED = (
    "this pair has ended: fleet.distribute(...) was called again with its parameters. Use the optimizer that it returned; or, if "
    "it was refused, call it once more as its error says. Where two optimizers that share parameters both step, give "
    "fleet.distribute one that holds all of these, once, and step the others as they are: fleet.distribute(model, "
    "torch.optim.SGD(model.parameters(), lr=0.1), strategy), which need not step itself."
)


_models_waiting: list[_Waiting] = []
_optimizers_waiting: list[weakref.ref[FleetOptimizer]] = []


def init(
    role: object = None,
    is_collective: bool = True,
    strategy: DistributedStrategy | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
) -> None:
    """Join the job: an existing process group, or a launcher's variables, or alone. A second call does nothing.

    `role` is Fleet's role maker; ranks come from the environment, so any role maker is accepted. `is_collective=False` would be
    a parameter server, which this library has not.

    Examples:
        >>> fleet.init()
        >>> fleet.is_initialized()
        True
    """
    if is_collective is not True:
        raise ConfigError(
            f"is_collective is {is_collective!r}: parameter servers are not supported. Write fleet.init(is_collective=True)."
        )
    if isinstance(role, str | DistributedStrategy):
        name = "backend" if isinstance(role, str) else "strategy"
        raise ConfigError(f"the first argument of fleet.init is a role maker, or none. Write fleet.init({name}=...).")
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f"strategy is {type(strategy).__name__}; it must be a fleet.DistributedStrategy.")
    global _default_strategy
    if strategy is not None:
        _default_strategy = strategy.copy()
    world.open_world(backend=backend, timeout=timeout)


def is_initialized() -> bool:
    """Return whether this process has joined the job.

    Examples:
        >>> fleet.is_initialized()
        True
    """
    return world.is_open()


def device() -> torch.device:
    """Return the device of this rank.

    Examples:
        >>> fleet.device().type in ("cpu", "cuda")
        True
    """
    return world.current().device


def worker_index() -> int:
    """Return this process's rank, from 0.

    Examples:
        >>> fleet.worker_index()
        0
    """
    return world.current().comm.rank


def worker_num() -> int:
    """Return how many ranks there are.

    Examples:
        >>> fleet.worker_num()
        1
    """
    return world.current().comm.size


def is_first_worker() -> bool:
    """Return whether this is rank 0, which prints and writes files for all.

    Examples:
        >>> if fleet.is_first_worker():
        ...     print("one line for all ranks")
        one line for all ranks
    """
    return worker_index() == 0


def local_rank() -> int:
    """Return this process's place on its node, from 0.

    Examples:
        >>> fleet.local_rank()
        0
    """
    return world.current().local_rank


def node_num() -> int:
    """Return how many nodes the ranks run on.

    Examples:
        >>> fleet.node_num()
        1
    """
    return world.current().node_num


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """Return `host:local_rank` of every rank, as a list or joined by commas.

    Examples:
        >>> [endpoint.rpartition(":")[2] for endpoint in fleet.worker_endpoints()]
        ['0']
    """
    endpoints = list(world.current().endpoints)
    return ",".join(endpoints) if to_string else endpoints


def barrier_worker() -> None:
    """Wait until every rank is here.

    Examples:
        >>> fleet.barrier_worker()
    """
    util.barrier()


def should_stop() -> bool:
    """Return whether a rank was asked to stop (SIGTERM, SIGUSR1, Ctrl-C): the same on every rank, renewed by each update.

    Call it after each step, save, and leave the loop. From the first call on these no longer end the process at once; the second
    Ctrl-C does.

    Examples:
        >>> if fleet.should_stop():
        ...     fleet.save_checkpoint("checkpoints", step=0, model=model, optimizer=optimizer)
    """
    stop_signal.arm()
    comm = world.for_call("fleet.should_stop")
    if comm.size == 1:
        return stop_signal.tell(stops=stop_signal.requested)
    agreed = stop_signal.was_agreed()
    if agreed is not None:
        return stop_signal.tell(stops=agreed)
    # No update carries the request in a job without a pair: ask all ranks here.
    request = torch.tensor([float(stop_signal.requested)], device=comm.control_device)
    comm.all_reduce(request, "max").wait()
    return stop_signal.tell(stops=bool(request > 0))


def sampler(
    dataset: Sized | int, shuffle: bool = True, seed: int = 0, drop_last: bool = False, pad: bool | None = None
) -> FleetSampler:
    """Make this rank's share of a dataset: equal counts for training (shuffle), every sample once for evaluation (no shuffle).

    `pad=True` gives equal counts also without shuffling, by reading a few samples twice, fewer than there are ranks; `pad=False`
    reads every sample once also with it; None is as `shuffle` is.

    Examples:
        >>> sampler = fleet.sampler(range(10), shuffle=False)
        >>> list(sampler)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    comm = world.current().comm
    return FleetSampler(dataset, rank=comm.rank, size=comm.size, shuffle=shuffle, seed=seed, drop_last=drop_last, pad=pad)


def autocast() -> AbstractContextManager[None]:
    """Enter the strategy's autocast, for a loss computed outside the model; without `amp` it does nothing.

    Examples:
        >>> with fleet.autocast():
        ...     loss = criterion(model(x), y)
    """
    return current_autocast.context()


def no_sync() -> AbstractContextManager[None]:
    """Leave the gradients of a bare `loss.backward()` local, as DDP's own no_sync; the next one outside reduces all of them.

    With optimizer.backward(loss) and minimize(loss), write strategy.gradient_merge instead.

    Examples:
        >>> model, optimizer = fleet.distribute(model, optimizer)
        >>> with fleet.no_sync():
        ...     criterion(model(x), y).backward()
        >>> criterion(model(x), y).backward()  # reduces the gradients of both
    """
    return leave_local()


def distribute(
    model: M,
    optimizer: Optimizer,
    strategy: DistributedStrategy | None = None,
    *,
    sample: Any = None,
    loss_fn: LossFn | None = None,
) -> tuple[M, FleetOptimizer]:
    """Prepare a model and its optimizer in place; the very same module comes back, with an optimizer that drives the strategy.

    `sample` (one batch) and `loss_fn(model, batch)` are for parts that must run steps themselves; for `auto` with a global batch
    `sample` may also be a function that makes a batch of so many rows.

    Examples:
        >>> strategy = fleet.DistributedStrategy(gradient_merge={"k_steps": 2})
        >>> model, optimizer = fleet.distribute(model, optimizer, strategy)
        >>> [optimizer.minimize(criterion(model(x), y)).due for _ in range(4)]
        [False, True, False, True]
    """
    optimizer = _given(optimizer)
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
    loss_fn: LossFn | None = None,
    global_batch: int | None = None,
    resize: Resize | None = None,
    size: int | None = None,
) -> FoundBatches:
    """Find the largest micro-batch that a budget of memory allows, and the fastest one; before `distribute`, on every rank.

    `sample` is a batch, of which others are made by repeating rows, or by `resize(sample, size)`. With `global_batch` the
    micro-batches make it up without a rest. Model and optimizer are afterwards as they were.

    Examples:
        >>> found = fleet.find_batch(model, optimizer, sample=(x, y), loss_fn=loss_fn, budget="50MB")
        >>> found.most >= len(x)
        True
    """
    from .recompute.batches import rows_of
    from .recompute.find_batch import found_batches, size_of, without_memory_parts

    require_plain_optimizer(optimizer)
    chosen, face = _chosen(strategy), FleetOptimizer(optimizer)
    limit = size_in_bytes().check("budget", budget)
    if global_batch is not None:
        global_batch = integer(1).check("global_batch", global_batch)
    length = size_of(sample) if size is None else integer(2).check("size", size)
    resize = rows_of if resize is None else resize
    if not callable(resize):
        raise ConfigError(f"resize is {resize!r}; it must be a function: resize(sample, size) gives a batch of that size.")
    require_loss_fn(loss_fn)
    refuse_steps_of_a_sample(model)
    bind(model, face, without_memory_parts(chosen), has_sample=True, checks=chosen)
    try:
        rehearsal = rehearsal_of(model, face, sample, loss_fn)
        found = found_batches(rehearsal, chosen, budget=limit, resize=resize, size=length, global_batch=global_batch)
    finally:
        give_up(model, face)
    if is_first_worker():
        log.say(found)
    return found


def distributed_model(model: M) -> M:
    """Fleet's two-call spelling, together with `distributed_optimizer`, in either order.

    Examples:
        >>> model = fleet.distributed_model(model)
        >>> optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy())
        >>> optimizer.minimize(criterion(model(x), y)).updated
        True
    """
    require_module(model)
    if any(model_pairs.owner_of(p) is not None for p in model.parameters()):
        return model  # distributed already, by fleet.distribute or as a part of another model
    mine = {id(p) for p in model.parameters()}
    for reference in list(_optimizers_waiting):
        face = reference()
        if face is None:
            _optimizers_waiting.remove(reference)
        elif mine & face.parameter_ids():
            _optimizers_waiting.remove(reference)
            _bind(model, face, face.strategy_waiting or DistributedStrategy())
            return model
    _models_waiting.append(_Waiting(model, NO_OPTIMIZER_YET))
    return model


def distributed_optimizer(optimizer: Optimizer, strategy: DistributedStrategy | None = None) -> FleetOptimizer:
    """Fleet's two-call spelling: the optimizer meets the model that `distributed_model` was or will be given.

    Examples:
        >>> optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(clip_norm=True))
        >>> model = fleet.distributed_model(model)
        >>> optimizer.minimize(criterion(model(x), y)).updated
        True
    """
    optimizer = _given(optimizer)
    require_plain_optimizer(optimizer)
    chosen = _chosen(strategy)
    face = FleetOptimizer(optimizer, strategy_waiting=chosen)
    check_parts(chosen.parts())
    for waiting in list(_models_waiting):
        model = waiting.model()
        if model is None:
            _models_waiting.remove(waiting)
        elif face.parameter_ids() & {id(p) for p in model.parameters()}:
            _bind(model, face, face.strategy_waiting or DistributedStrategy())
            return face
    _optimizers_waiting.append(weakref.ref(face))
    return face


def _late(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __package__), name)
    hint = f" Here it is fleet.{ELSEWHERE[name]}." if name in ELSEWHERE else did_you_mean(name, __all__)
    raise AttributeError(f"fleet has no attribute `{name}`.{hint}")


if not TYPE_CHECKING:  # checkers know the names, so that they find unknown ones
    __getattr__ = _late


def __dir__() -> list[str]:
    return sorted(__all__)


def _chosen(strategy: DistributedStrategy | None) -> DistributedStrategy:
    """Copy the strategy: changing the user's object later changes nothing here."""
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f"strategy is {type(strategy).__name__}; it must be a fleet.DistributedStrategy.")
    return (strategy or _default_strategy or DistributedStrategy()).copy()


def _given(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer inside, where one is distributed once more: a notebook's cell that is run again."""
    return optimizer.given if isinstance(optimizer, FleetOptimizer) else optimizer


def _end_earlier_pair(model: nn.Module, face: FleetOptimizer, strategy: DistributedStrategy) -> bool:
    """End the pair that has these parameters. What can be refused at a glance is refused before that. Whether there was one."""
    require_module(model)
    check_parts(strategy.parts(), by_ddp=bare(model) is not model)
    params = list(named_trainable(bare(model), face.given).values())
    had_one = any(model_pairs.owner_of(param) is not None for param in params)
    model_pairs.end_owners(params, PAIR_HAS_ENDED)
    model_pairs.drop_discarded()
    return had_one


def _forget_run() -> None:
    global _has_said_run
    _has_said_run = False


world.at_close(_forget_run)


def _say_start(strategy: DistributedStrategy) -> None:
    """Log one line about the run, before its first strategy, and one about the strategy, or the whole table if that is wanted."""
    global _has_said_run
    if not _has_said_run:
        _has_said_run = True
        here = world.current()
        nodes = f" on {here.node_num} node{'s' * (here.node_num > 1)}, {here.comm.backend}" if here.comm.size > 1 else ""
        log.say(f"fleetx {__version__}: {here.comm.size} worker{'s' * (here.comm.size > 1)}{nodes}, {here.device.type}")
    if log.shows(logging.DEBUG):
        log.say(strategy, logging.DEBUG)
    else:
        changed = {
            name: value for name, value in strategy.to_dict().items() if name in SCALARS and value != SCALARS[name].default
        }
        log.say(one_line(strategy.parts(), changed))
    for sentence in without_effect(strategy.parts()):
        log.say(sentence)


def _planned(
    model: nn.Module, face: FleetOptimizer, strategy: DistributedStrategy, auto: Auto, sample: Any, loss_fn: LossFn | None
) -> tuple[DistributedStrategy, Any]:
    """Let `auto` choose a strategy, by steps that leave no trace, and a batch for it; worker 0 shows why."""
    from .auto.fixed_parts import Fixed
    from .auto.search import chosen_plan
    from .auto.subject import Subject

    require_module(model)
    here = world.current()
    # First of all: a rank that wants something else would be in other collectives than the rest.
    agree_on_model(named_trainable(model, face.given), model, face.given, strategy.to_json(), here.comm)
    check_parts(strategy.parts())  # a conflict among the parts that are set is no plan's fault
    scalars = {name: value for name, value in strategy.to_dict().items() if name in SCALARS}
    subject = Subject(model, face.given, sample, loss_fn, here.comm, here.device, scalars, Fixed.of(strategy.parts()))
    random = [(source, source.get()) for source in [*torch_sources(here.device), PYTHON, NUMPY]]
    try:  # a function that makes samples may draw, as often as there was time for
        face.plan = plan = chosen_plan(subject, auto)
        sample = subject.made(plan.micro_batch) if plan.micro_batch else sample
    finally:
        for source, state in random:
            source.set(state)
        heartbeat.at_step(0)
    if here.comm.rank == 0:
        log.say(plan)
    return plan.strategy, sample


def _warnings_of(parts: list[Part]) -> AbstractContextManager[None]:
    """Auto has measured what a part would warn of, if it has chosen it. Parts that the user has set are heard."""
    if not (len(parts) == 1 and isinstance(parts[0], Auto)):
        return contextlib.nullcontext()
    from .auto.subject import silence

    return silence()


def _with_own_sharding(model: nn.Module, strategy: DistributedStrategy) -> DistributedStrategy:
    """Name as a part of the strategy what the script has done to the model by torch's fully_shard."""
    require_module(model)
    if is_fully_sharded(bare(model)) and not strategy.sharding:
        strategy = strategy.copy()
        strategy.sharding = {"stage": 3}
    return strategy


def _bind(
    model: nn.Module, face: FleetOptimizer, strategy: DistributedStrategy, *, sample: Any = None, loss_fn: LossFn | None = None
) -> None:
    """Worker 0 shows the strategy before steps of the sample are run: what they settle is told below it."""
    require_loss_fn(loss_fn)
    strategy = _with_own_sharding(model, strategy)
    parts = strategy.parts()
    auto = next((part for part in parts if isinstance(part, Auto)), None)
    if auto is not None or sample is not None:
        refuse_steps_of_a_sample(model)
    if auto is not None and any(part.divides_weights for part in parts):
        raise ConfigError(
            "strategy.auto beside strategy.sharding of stage 3: its measurements are steps that each rank runs alone, while a "
            "forward of divided weights needs all ranks. Use stage 1 or 2 beside it, or leave strategy.auto out."
        )
    replaces = _end_earlier_pair(model, face, strategy)
    waited = _stop_waiting(model, face)  # steps of a sample are backwards too
    try:
        _bind_new(model, face, strategy, sample, loss_fn)
    except BaseException as error:  # the script may catch it and go on, with what is not, or no longer, a pair
        _models_waiting.extend(_Waiting(held, why) for held, why in waited)
        if replaces:
            why = (
                "this model has no pair: fleet.distribute(...) was called again, which ended the earlier one, and was refused "
                f"({first_line(error)}) Correct that, and call fleet.distribute(...) once more."
            )
            _models_waiting.append(_Waiting(model, why))
        raise


def _stop_waiting(model: nn.Module, face: FleetOptimizer) -> list[tuple[nn.Module, str]]:
    """Take back the refusal of gradients for every model that this pair trains; these models, and what was said of each."""
    mine, found = face.parameter_ids(), []
    for waiting in list(_models_waiting):
        held = waiting.model()
        if held is None or held is model or any(id(p) in mine for p in held.parameters()):
            _models_waiting.remove(waiting)
            waiting.end()
        if held is not None and waiting not in _models_waiting:
            found.append((held, waiting.why))
    return found


def _asked(auto: Auto, parts: list[Part]) -> dict[str, Any]:
    """Return what a plan answers: the wishes, the parts that are kept, and how many ranks there are."""
    kept = {part.name: dataclasses.asdict(part) for part in parts if part is not auto}
    wishes = {name: value for name, value in dataclasses.asdict(auto).items() if name not in ("plan", "trials")}
    return {"auto": wishes, "kept": kept, "ranks": worker_num()}


def _taking_up(model: nn.Module, face: FleetOptimizer, sample: Any, loss_fn: LossFn | None) -> Callable[[dict[str, Any]], None]:
    """Make what lets this pair go on with the strategy of a checkpoint. Every rank calls it, at the same place."""
    model_of, face_of = weakref.ref(model), weakref.ref(face)

    def take_up(saved: dict[str, Any]) -> None:
        held, optimizer = model_of(), face_of()
        if held is None or optimizer is None or optimizer.plan is None:
            return
        strategy = DistributedStrategy.from_dict(saved["settings"])
        number, plan, batches = optimizer.pipeline.report_builder.pair, optimizer.plan, saved["plan"]
        give_up(held, optimizer)
        optimizer.update, optimizer.ended = optimizer.given, ""
        bind(held, optimizer, strategy, has_sample=sample is not None, is_placed=True)
        optimizer.pipeline.report_builder.pair = number
        optimizer.plan = dataclasses.replace(plan, strategy=strategy, reused_from="the checkpoint", **batches)
        current_autocast.use(optimizer)
        registry.note_strategy(optimizer, strategy)
        if is_first_worker():
            log.say(f"auto: {batches['chosen']}, as the run that saved the checkpoint; this start had chosen {plan.chosen}.")
        if sample is not None:
            rehearse(held, optimizer, strategy, rehearsal_of(held, optimizer, sample, loss_fn))

    return take_up


def _bind_new(model: nn.Module, face: FleetOptimizer, strategy: DistributedStrategy, sample: Any, loss_fn: LossFn | None) -> None:
    parts = strategy.parts()
    auto = next((part for part in parts if isinstance(part, Auto)), None)
    if auto is not None:
        strategy, sample = _planned(model, face, strategy, auto, sample, loss_fn)
        face.asked_of_auto, face.take_up = _asked(auto, parts), _taking_up(model, face, sample, loss_fn)
    elif callable(sample):
        raise ConfigError("sample is a function, which only strategy.auto takes. Give one batch, as the loop gives it.")
    with _warnings_of(parts):
        bind(model, face, strategy, has_sample=sample is not None)
    current_autocast.use(face)
    registry.enlist(model, face, strategy)
    memory_advice.advise_at_exit()
    if is_first_worker():
        _say_start(strategy)
    if sample is not None:
        rehearse(model, face, strategy, rehearsal_of(model, face, sample, loss_fn))
