"""From a strategy to a pipeline: collect claims, refuse conflicts all at once, build each part, fill the empty slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...dist.comm import Comm
from ...dist.fully_sharded import is_fully_sharded
from ...errors import ConfigError
from ..buckets import Buckets
from ..checks.checks import Checks, DeferredErrors, UnusedCheck
from ..checks.desync import RankCheck
from ..checks.first_batch import FirstLook
from ..checks.flips import FlipWatch
from ..checks.half_sent import HalfSent
from ..checks.nonfinite import NonFiniteGuard
from ..dense_reduce import DenseAllReduce, ReducedInBackward
from ..noise_scale import NoiseScaleMeter, require_measurable
from ..optimizer import FleetOptimizer
from ..sidecar import AlarmReader, Tail
from ..slots import Merge, Part, Site, Slot, Stages
from ..step import Pipeline
from ..user_loop.ddp import ReducedByDDP, allows_unused
from ..window import PlainBackward

if TYPE_CHECKING:
    from ...strategy import DistributedStrategy


@dataclass(frozen=True, slots=True)
class Compiled:
    pipeline: Pipeline
    forward: Any | None
    """The FORWARD stage (autocast), if a part claims it."""


def compile_strategy(
    strategy: DistributedStrategy,
    parts: Sequence[Part],
    *,
    model: nn.Module,
    optimizer: Optimizer,
    params: Mapping[str, nn.Parameter],
    comm: Comm,
    device: torch.device,
    wrapper: DistributedDataParallel | None = None,
) -> Compiled:
    """Build each part of the strategy once, and fill the slots that none of them claims. `parts` were checked before.

    `wrapper`: DistributedDataParallel around the model, where it reduces."""
    local = strategy.local_buffers
    site = Site(model=model, optimizer=optimizer, params=params, comm=comm, device=device, local_buffers=local, parts=parts)
    merging = next((part for part in parts if Slot.MERGE in part.claims()), None)
    filled: dict[Slot, Any] = {} if merging is None else dict(merging.build(site))
    merge = filled.get(Slot.MERGE, Merge())
    # Before another part changes anything.
    wrapped = "DistributedDataParallel" if wrapper is not None else "fully_shard" if is_fully_sharded(model) else None
    require_measurable(strategy.noise_scale_steps, parts=parts, merge=merge, comm=comm, wrapped=wrapped)
    for part in parts:
        if part is not merging:
            filled.update(part.build(site))
    allowed = strategy.find_unused_parameters or (wrapper is not None and allows_unused(wrapper))
    shard = filled.get(Slot.SHARD)
    if shard is not None and shard.merges_shares and strategy.noise_scale_steps:
        raise ConfigError(
            f"noise_scale_steps is {strategy.noise_scale_steps}: it needs each rank's own gradients of a micro-step, which "
            "merge_sharded reduces. Set strategy.noise_scale_steps = 0, or leave merge_sharded out."
        )
    reduce = filled.get(Slot.REDUCE) or (DenseAllReduce(comm) if wrapper is None else ReducedByDDP(wrapper, comm))
    if shard is not None:
        reduce = shard.reduce_by(reduce, may_miss=allowed)
    stages = Stages(
        merge=merge,
        backward=filled.get(Slot.BACKWARD, PlainBackward()),
        reduce=reduce,
        clip=filled.get(Slot.CLIP),
        update=filled.get(Slot.UPDATE, optimizer),
        average=filled.get(Slot.AVERAGE),
        shard=shard,
        in_backward=reduce if isinstance(reduce, ReducedInBackward) else None,
    )
    flags = len(params) if allowed else 0
    tail = Tail(model, rank=comm.rank, size=comm.size, flags=flags, local=local) if comm.size > 1 else None
    bucket_bytes = int(strategy.fuse_grad_size_in_MB * 2**20)
    carries_tail, whole = stages.reduce.carries_tail, stages.in_backward is not None
    buckets = Buckets(
        params if shard is None else shard.in_buckets(params),
        bucket_bytes=bucket_bytes,
        tail=tail,
        carries_tail=carries_tail,
        comm=comm,
        whole=whole,
        shard=shard,
    )
    stages.reduce.attach(buckets)
    if shard is not None:
        shard.attach(buckets, stages.update, given=optimizer)
    # A rank that misses a gradient starts its bucket later than the others. If a part's own collective lies in between,
    # one rank sends a bucket while another sends that: both go wrong. So nothing starts before backward has ended.
    buckets.overlaps = not any(part.talks_in_backward for part in parts)
    may_skip = stages.backward.checks_finite or strategy.on_nan_inf == "skip"
    checks = Checks(
        unused=UnusedCheck(buckets, comm, allowed=allowed),
        first_look=FirstLook(model, wrapper, parts),
        finite=NonFiniteGuard(strategy.on_nan_inf, model, buckets, comm, may_skip=may_skip, local=local),
        ranks=RankCheck(
            model,
            comm,
            tail,
            every=strategy.desync_check_steps,
            own=params.values(),
            optimizer=stages.update,
            weights=shard is None or not shard.holds_weights,
        ),
        alarms=AlarmReader(buckets, may_miss=allowed),
        deferred_errors=DeferredErrors(),
        half_sent=HalfSent(comm),
        flips=FlipWatch(
            params, stages.update, is_on=comm.size > 1 and stages.average is not None and strategy.desync_check_steps > 0
        ),
        comm=comm,
    )
    meter = NoiseScaleMeter(strategy.noise_scale_steps, merge=stages.merge, comm=comm)
    pipeline = Pipeline(stages, buckets, comm, checks, meter)
    return Compiled(pipeline=pipeline, forward=filled.get(Slot.FORWARD))


def require_plain_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"distribute was given {type(optimizer).__name__} as the optimizer; it takes a torch.optim.Optimizer.")
    if isinstance(optimizer, FleetOptimizer):
        raise ConfigError("this optimizer is already distributed. Give the torch optimizer itself, once.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS needs a closure, which runs backward several times for one update, past the reducer. Use SGD or Adam."
        )
