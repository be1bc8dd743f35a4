"""What the benches of throughput between two hosts share: one MLP, its data, and trainings of it by ours and by torch's DDP.

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
from torch.nn.parallel import DistributedDataParallel

from fleetx import fleet

LR = 1e-3
NEVER = 10**9


@dataclass(frozen=True)
class Size:
    """Of the MLP: 10.5 million parameters."""

    width: int = 1024
    layers: int = 10
    batch: int = 192

    @property
    def weights(self) -> int:
        return self.layers * self.width**2

    @property
    def biases(self) -> int:
        return self.layers * self.width


USUAL = Size()


@dataclass(frozen=True)
class Contestant:
    name: str
    step: Callable[[], int | None]
    """Makes one step; the bytes it sent, where it counts them."""
    block_steps: int
    period: int
    wire_bytes: int
    """What a rank sends in one averaging, or in one step of a synchronous training; 0 where that is only counted."""
    warm_steps: int
    """Afterwards it is in the middle of nothing."""

    @property
    def untimed_steps(self) -> int:
        """At the start of each block, a whole period: memory that lay idle while others had their turn is slow at first."""
        return 1 if self.period == NEVER else self.period


def mlp(size: Size = USUAL) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(size.layers) for layer in (nn.Linear(size.width, size.width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def data(size: Size = USUAL) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1 + fleet.worker_index())
    return torch.randn(size.batch, size.width), torch.randn(size.batch, size.width)


def sent_by_all_reduce(numel: int, item_bytes: int) -> int:
    size = fleet.worker_num()
    return 2 * (size - 1) * numel * item_bytes // size


def our_step(strategy: dict[str, Any], size: Size = USUAL, *, momentum: float = 0.0) -> Callable[[], int]:
    with contextlib.redirect_stdout(io.StringIO()):  # the overview of each strategy
        sgd = torch.optim.SGD((model := mlp(size)).parameters(), lr=LR, momentum=momentum)
        model, optimizer = fleet.distribute(model, sgd, fleet.DistributedStrategy(**strategy))
    x, y = data(size)

    def step() -> int:
        return int(optimizer.minimize(nn.functional.mse_loss(model(x), y)).bytes_sent)

    return step


def plain_step(model: nn.Module, size: Size = USUAL, *, momentum: float = 0.0) -> Callable[[], None]:
    """As users write it; whatever is sent, the model's wrapper sends."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    x, y = data(size)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def ddp(*, block_steps: int, size: Size = USUAL, momentum: float = 0.0) -> Contestant:
    step = plain_step(DistributedDataParallel(mlp(size)), size, momentum=momentum)
    return Contestant("torch DDP", step, block_steps, 1, sent_by_all_reduce(size.weights + size.biases, 4), 3)
