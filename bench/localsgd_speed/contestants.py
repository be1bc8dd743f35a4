"""The trainings that bench/localsgd_speed compares: the MLP of bench/lib/mlp.py by Local SGD and by torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.lib.mlp import LR, NEVER, USUAL, Contestant, data, mlp, our_step, sent_by_all_reduce
from fleetx import fleet
from fleetx.dist.predicted_cost import Link
from fleetx.strategies.localsgd import LocalSGD

NUMEL = USUAL.weights + USUAL.biases


def ours(name: str, configs: dict[str, Any], *, block_steps: int) -> Contestant:
    period, overlap = configs["k_steps"], configs.get("overlap_steps", 0)
    warm = 2 if period == NEVER else 1 + period + overlap
    wire_bytes = (
        0 if period == NEVER else round(LocalSGD(**configs).wire_cost([(NUMEL,)], Link(fleet.worker_num(), 1.0)).bytes_sent)
    )
    step = our_step({"localsgd": True, "localsgd_configs": configs})
    return Contestant(name, step, block_steps, period, wire_bytes, warm)


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

    return Contestant(f"torch post-local k={period}", step, block_steps, period, sent_by_all_reduce(NUMEL, 4), begin + period + 1)
