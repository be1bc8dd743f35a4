"""The small runs that tests of Local SGD share: one problem, trained by the engine on real ranks, or by hand beside it."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.dist import world
from fleetx.errors import FleetWarning
from tests.helpers.localsgd_reference import Array, Rule, Workers, net_gradient, simulate

ROWS = 6
LR = 0.1


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The net that the reference derives by hand."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def with_norm() -> nn.Sequential:
    """One that has buffers. No bias before BatchNorm: its gradient is rounding noise, which Adam would blow up."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def flat(model: nn.Module) -> Array:
    return np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()])


def rows_of(rank: int, update: int, micro: int = 0, rows: int = ROWS) -> tuple[Array, Array]:
    """Data that depends on its indices alone, and is not alike on two ranks: they would not drift apart otherwise."""
    draws = np.random.default_rng((update, micro, rank))
    x = draws.normal(size=(rows, 3))
    y = np.stack([np.sin(x[:, 0] + rank), x[:, 1] * x[:, 2] + 0.5 * rank], axis=1)
    return x, y


def loss_of(model: nn.Module, rank: int, update: int, micro: int = 0) -> Tensor:
    dtype = next(model.parameters()).dtype
    x, y = (torch.from_numpy(array).to(dtype) for array in rows_of(rank, update, micro))
    return F.mse_loss(model(x), y)


def weight_of(rank: int, update: int, micro: int = 0) -> float:
    return 1.0 + (2 * rank + update + micro) % 4


def rate(update: int, drops: dict[int, float]) -> float:
    """The learning rate of an update: LR, or what it dropped to last."""
    return next((drops[start] for start in sorted(drops, reverse=True) if update >= start), LR)


@dataclass
class Trace:
    """What one rank saw, after each update."""

    weights: list[Array] = field(default_factory=list)
    periods: list[int | None] = field(default_factory=list)
    averaged: list[bool] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    waited: list[dict[int, float] | None] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: what the strategy says, and how the loop goes."""

    strategy: dict[str, Any]
    updates: int = 12
    momentum: float = 0.0
    merged: int = 1
    weighted: bool = False
    drops: dict[int, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    bad: tuple[int, int] | None = None
    """Rank and update whose loss is not finite, for a strategy that skips it there; without momentum."""


def train(rank: int, case: Case) -> Trace:
    """The engine, through public names alone."""
    model = net(case.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=case.momentum)
    strategy = fleet.DistributedStrategy(**case.strategy)
    if case.merged > 1:
        strategy.gradient_merge, strategy.gradient_merge_configs = True, {"k_steps": case.merged}
    model, ours = fleet.distribute(model, optimizer, strategy)
    trace = Trace()
    for update in range(1, case.updates + 1):
        ours.param_groups[0]["lr"] = rate(update, case.drops)
        sent = 0
        for micro in range(case.merged):
            loss, weight = loss_of(model, rank, update, micro), weight_of(rank, update, micro) if case.weighted else None
            if case.bad == (rank, update):
                loss = loss * float("nan")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if case.bad else "error", FleetWarning)  # of a skip
                report = ours.minimize(loss, weight=weight)
            sent += report.bytes_sent
        trace.weights.append(flat(model))
        trace.periods.append(report.period)
        trace.averaged.append(report.averaged)
        trace.losses.append(report.loss or 0.0)
        trace.bytes_sent.append(sent)
        trace.waited.append(report.waited)
    return trace


def expected(case: Case, rule: Rule, *, ranks: int, make: type[Workers] = Workers) -> Workers:
    """The reference on the same problem."""

    def gradient(rank: int, update: int, p: Array) -> tuple[float, Array]:
        if case.bad == (rank, update):
            return 0.0, np.zeros_like(p)
        told = [net_gradient(p, *rows_of(rank, update, micro)) for micro in range(case.merged)]
        weights = [weight_of(rank, update, micro) if case.weighted else 1.0 for micro in range(case.merged)]
        loss = sum(w * loss for w, (loss, _) in zip(weights, told, strict=True)) / sum(weights)
        return loss, np.asarray(sum(w * g for w, (_, g) in zip(weights, told, strict=True)) / sum(weights))

    def weight(rank: int, update: int) -> float:
        return sum(weight_of(rank, update, micro) for micro in range(case.merged)) if case.weighted else 1.0

    return simulate(
        flat(net()),
        gradient,
        rule,
        ranks=ranks,
        updates=case.updates,
        lr=lambda update: rate(update, case.drops),
        momentum=case.momentum,
        weight=weight,
        make=make,
    )


def on_nodes(rank: int, nodes: tuple[int, ...], rendezvous: str, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(rank, *args)` in a world whose ranks say that they are on these nodes."""
    world.close_world()
    os.environ["GROUP_RANK"] = str(nodes[rank])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=len(nodes))
    try:
        fleet.init()
        return fn(rank, *args)
    finally:
        world.close_world()
        del os.environ["GROUP_RANK"]


def rendezvous(folder: Path) -> str:
    """A name no earlier group has used."""
    return str(folder / f"nodes-{uuid.uuid4().hex}")


# --- any model and optimizer, by hand: plain torch on each rank, and what must be averaged gathered and averaged ---------------


def gathered(tensor: Tensor) -> Tensor:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return torch.stack(rows)


def mean_over_ranks(tensor: Tensor) -> Tensor:
    return gathered(tensor.detach()).mean(dim=0)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that training changes, by name."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{number}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _floats(model: nn.Module) -> list[Tensor]:
    return [t.detach() for t in model.state_dict().values() if t.is_floating_point()]


@torch.no_grad()
def _meet(model: nn.Module, optimizer: torch.optim.Optimizer, *, average_state: bool) -> None:
    for tensor in model.state_dict().values():
        tensor.copy_(mean_over_ranks(tensor) if tensor.is_floating_point() else gathered(tensor)[0])
    for state in optimizer.state.values() if average_state else []:
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.copy_(gathered(value).amax(dim=0) if key == "step" else mean_over_ranks(value))


def train_by_hand(
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    k: int,
    begin: int,
    updates: int,
    overlap: int = 0,
    average_state: bool = False,
) -> list[dict[str, Tensor]]:
    """Plain averaging: no outer step. The snapshot after each update."""
    history, sent, means = [], [], []
    for update in range(1, updates + 1):
        optimizer.zero_grad()
        loss_of(model, rank, update).backward()
        if update <= begin:
            for param in model.parameters():
                assert param.grad is not None
                param.grad = mean_over_ranks(param.grad)
        optimizer.step()
        if update <= begin:
            for buffer in model.buffers():
                buffer.copy_(mean_over_ranks(buffer) if buffer.is_floating_point() else gathered(buffer)[0])
        since = (update - begin) % k
        if update > begin and overlap and since == overlap % k and sent:
            for tensor, mean, old in zip(_floats(model), means, sent, strict=True):
                tensor.add_(mean - old)
        if update > begin and since == 0:
            if overlap:
                sent = [tensor.clone() for tensor in _floats(model)]
                means = [mean_over_ranks(tensor) for tensor in sent]
            else:
                _meet(model, optimizer, average_state=average_state)
        history.append(snapshot(model, optimizer))
    return history
