"""One training step of each method of bench/localsgd_table, on the CPU: the same network, batch and SGD, driven by each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.lib.resnet9 import ResNet9
from bench.localsgd_table import methods
from bench.localsgd_table.methods import Settings, first_period, strategy
from fleetx import fleet
from fleetx.engine.report import Report

LR, MOMENTUM = 0.01, 0.9
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A network, and how many samples each rank shows it in one step."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int


def mlp(width: int = 1024, layers: int = 10) -> nn.Module:
    """10.5 million parameters. torch's own initial weights are too small for ten layers: nothing would be learnt."""
    linear = [nn.Linear(width, width) for _ in range(layers)]
    for layer in linear:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.ReLU()) for layer in linear))[:-1]


def cases(width: int) -> dict[str, Case]:
    return {
        "mlp": Case(mlp, (1024,), 192),
        "resnet9": Case(lambda: ResNet9(width=width, activation="celu"), (3, 32, 32), 16),
        "tiny": Case(lambda: mlp(16, 3), (16,), 4),
    }


@dataclass(frozen=True)
class Contestant:
    step: Callable[[float], Report | None]
    """One update at this learning rate."""
    first_round: int
    """Exchanges follow the updates first_round + n * period."""
    close: Callable[[], None] = lambda: None


class NotHere(Exception):
    """Why a peer cannot take part."""


def contestant(method: str, case: Case, settings: Settings, begin: int) -> Contestant:
    torch.manual_seed(0)
    model = case.make()
    torch.manual_seed(1 + fleet.worker_index())
    batch = torch.randn(case.batch, *case.shape), torch.randint(CLASSES, (case.batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    if method in methods.OURS:
        return ours(strategy(method, settings, begin), model, optimizer, batch, begin)
    if method == methods.ALONE:
        return plain(model, optimizer, batch)
    if method == methods.DDP:
        return plain(nn.parallel.DistributedDataParallel(model), optimizer, batch)
    period = first_period(method, settings)
    return (post_local if method in methods.TORCH else accelerated)(model, optimizer, batch, period)


def ours(chosen: dict[str, Any], model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], begin: int) -> Contestant:
    images, labels = batch
    with contextlib.redirect_stdout(None):
        model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**chosen))

    def step(lr: float) -> Report:
        optimizer.param_groups[0]["lr"] = lr
        with contextlib.redirect_stdout(None):  # each change of ADACOMM's period
            return optimizer.minimize(F.cross_entropy(model(images), labels))

    return Contestant(step, begin)


def plain(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], first_round: int = 1) -> Contestant:
    """Whatever is done beyond a plain loop is done by the model's or the optimizer's wrapper."""
    images, labels = batch

    def step(lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(step, first_round)


def post_local(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], period: int) -> Contestant:
    """As torch's documentation has it, each rank a group of its own: no gradient travels after the first update."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    state = PostLocalSGDState(None, None, start_localSGD_iter=1, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averaging = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period, warmup_steps=1))
    return plain(wrapped, averaging, batch, first_round=2)


def accelerated(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], period: int) -> Contestant:
    try:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD
    except ImportError as error:
        raise NotHere(f"accelerate cannot be imported: {error}") from error
    images, labels = batch
    accelerator = Accelerator(cpu=True)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    local = LocalSGD(accelerator=accelerator, model=wrapped, local_sgd_steps=period)
    local.__enter__()

    def step(lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr
        accelerator.backward(F.cross_entropy(wrapped(images), labels))
        prepared.step()
        prepared.zero_grad()
        local.step()

    return Contestant(step, period, close=lambda: local.__exit__(None, None, None))
