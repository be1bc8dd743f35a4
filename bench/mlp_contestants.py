"""What the benches of throughput between two hosts share: one MLP, its data, DDP beside it, and turns of timed blocks.

A contestant makes whole blocks of steps. Each begins and ends with nothing under way, so that no transfer hides behind the
next contestant's turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
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
    step: Callable[[], int | None]
    """Makes one step; the bytes it sent, where it counts them."""
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


def numel_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def ddp(
    *,
    block_steps: int,
    momentum: float = 0.0,
    name: str = "torch DDP",
    hook: Callable[[DistributedDataParallel], None] | None = None,
    item_bytes: int = 4,
    warm_steps: int = 3,
) -> Contestant:
    """torch's DistributedDataParallel; `hook` gives it a communication hook, which sends numbers of `item_bytes`."""
    model = DistributedDataParallel(mlp())
    if hook is not None:
        hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    x, y = data()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return Contestant(name, step, block_steps, 1, sent_by_all_reduce(numel_of(model), item_bytes), warm_steps)


def warm(rows: Sequence[Contestant]) -> None:
    for one in rows:
        for _ in range(one.warm_steps):
            one.step()


def block_seconds(one: Contestant) -> tuple[float, list[int | None]]:
    """Of a step, and what each sent."""
    fleet.barrier_worker()
    start = time.perf_counter()
    sent = [one.step() for _ in range(one.block_steps)]
    return (time.perf_counter() - start) / one.block_steps, sent


def in_turns(rows: Sequence[Contestant], rounds: int) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """By name: seconds of a step in each round, as the slowest rank had them, and bytes of a step, where they are counted."""
    samples: dict[str, list[float]] = {one.name: [] for one in rows}
    counted: dict[str, list[int | None]] = {one.name: [] for one in rows}
    for turn in range(rounds):
        first = turn % len(rows)
        for one in [*rows[first:], *rows[:first]]:
            seconds, sent = block_seconds(one)
            samples[one.name].append(float(fleet.util.all_reduce(seconds, "max")))
            counted[one.name] += sent
            if fleet.is_first_worker():
                print(f"{one.name:28} {samples[one.name][-1] * 1e3:8.1f} ms a step", flush=True)
    return samples, {name: mean_of(sent) for name, sent in counted.items()}


def mean_of(sent: Sequence[int | None]) -> float | None:
    known = [one for one in sent if one is not None]
    return sum(known) / len(known) if known else None
