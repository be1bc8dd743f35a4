"""The trainings that bench/localsgd_speed.py compares: the same MLP, driven by ours, by DDP, and by torch's post-local SGD.

A contestant makes whole blocks of steps. Each begins and ends with nothing under way, so that no transfer hides behind the
next contestant's turn.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet

WIDTH, LAYERS, BATCH = 1024, 10, 192
LR = 1e-3
NEVER = 10**9


def mlp() -> nn.Sequential:
    """10.5 million parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Contestant:
    name: str
    step: Callable[[], None]
    block_steps: int
    period: int
    wire_bytes: int
    """What a rank sends in one averaging, or in one step of a synchronous training."""
    warm_steps: int
    """Afterwards it is in the middle of nothing."""


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1 + fleet.worker_index())
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def sent_by_all_reduce(numel: int, item_bytes: int) -> int:
    size = fleet.worker_num()
    return 2 * (size - 1) * numel * item_bytes // size


def ours(name: str, configs: dict[str, Any], *, block_steps: int) -> Contestant:
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=configs)
    with contextlib.redirect_stdout(io.StringIO()):  # the overview of each strategy
        model, optimizer = fleet.distribute(model := mlp(), torch.optim.SGD(model.parameters(), lr=LR), strategy)
    x, y = data()
    numel = sum(p.numel() for p in model.parameters())
    item_bytes = 2 if configs.get("wire_dtype") == "bfloat16" else 4
    period, overlap = configs["k_steps"], configs.get("overlap_steps", 0)
    warm = 2 if period == NEVER else 1 + period + overlap
    wire_bytes = 0 if period == NEVER else sent_by_all_reduce(numel, item_bytes)

    def step() -> None:
        optimizer.minimize(nn.functional.mse_loss(model(x), y))

    return Contestant(name, step, block_steps, period, wire_bytes, warm)


def ddp(*, block_steps: int) -> Contestant:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = data()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    numel = sum(p.numel() for p in model.parameters())
    return Contestant("torch DDP", step, block_steps, 1, sent_by_all_reduce(numel, 4), 3)


def torch_post_local(period: int, *, block_steps: int) -> Contestant:
    model = DistributedDataParallel(mlp())
    begin = 2
    state = post_local.PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=begin, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=period, warmup_steps=begin))
    x, y = data()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)  # the averager leaves out what has no gradient
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    numel = sum(p.numel() for p in model.parameters())
    return Contestant(f"torch post-local k={period}", step, block_steps, period, sent_by_all_reduce(numel, 4), begin + period + 1)
