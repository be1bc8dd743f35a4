"""Accelerate's settings as a strategy's, and the variables by which Accelerate knows a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from fleetx import fleet
from fleetx.dist import world
from fleetx.errors import ConfigError
from fleetx.strategy import DistributedStrategy

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
HANDLERS = {
    "DistributedDataParallelKwargs": "there is no DDP here: strategy.find_unused_parameters, strategy.fuse_grad_size_in_MB",
    "GradScalerKwargs": "strategy.amp_configs has the loss scale",
    "AutocastKwargs": "strategy.amp_configs has the precision",
}


def copied(strategy: DistributedStrategy | None) -> DistributedStrategy:
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f"strategy is {type(strategy).__name__}; it must be a fleet.DistributedStrategy.")
    return fleet._chosen(strategy)


def merged(strategy: DistributedStrategy, window: int, *, said: str) -> DistributedStrategy:
    """A copy that merges `window` micro-batches. Their losses come divided already, so gradients are summed."""
    strategy = strategy.copy()
    if window > 1:
        if strategy.gradient_merge:
            raise ConfigError(
                f"{said}={window} and strategy.gradient_merge both say how many micro-batches make one update. Keep one of them."
            )
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": window, "avg": False}
    return strategy


def with_precision(strategy: DistributedStrategy, precision: str | None) -> DistributedStrategy:
    """A copy that has Accelerate's mixed precision as its own."""
    strategy = strategy.copy()
    if precision in (None, "no"):
        return strategy
    if precision not in DTYPES:
        raise ConfigError(f'mixed_precision="{precision}" is not supported; "no", "bf16" and "fp16" are.')
    if strategy.amp:
        raise ConfigError(f'mixed_precision="{precision}" and strategy.amp both set the precision. Keep one of them.')
    strategy.amp = True
    strategy.amp_configs = {"dtype": DTYPES[precision]}
    return strategy


@contextlib.contextmanager
def world_shown(variables: MutableMapping[str, str]) -> Iterator[None]:
    """Accelerate knows ranks by these variables alone; a group made from Slurm's or MPI's it would not see."""
    here = world.current()
    host = here.endpoints[here.comm.rank].rpartition(":")[0]
    neighbours = sum(endpoint.rpartition(":")[0] == host for endpoint in here.endpoints)
    told = {"RANK": here.comm.rank, "WORLD_SIZE": here.comm.size, "LOCAL_RANK": here.local_rank, "LOCAL_WORLD_SIZE": neighbours}
    added = [name for name in told if name not in variables and here.comm.size > 1]
    variables.update({name: str(told[name]) for name in added})
    try:
        yield
    finally:  # a process started from here would take itself for this rank
        for name in added:
            variables.pop(name, None)


def refuse_handlers(handlers: Iterable[Any]) -> None:
    for handler in handlers:
        name = type(handler).__name__
        if name in HANDLERS:
            raise ConfigError(f"kwargs_handlers holds {name}, which nothing would follow: {HANDLERS[name]}. Leave it out.")
