"""Train small compiled models, and count the graphs that torch's compiler makes of them and the places where it gives up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import FleetWarning

WIDTH, BLOCKS, STEPS = 16, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(torch.relu(self.inner(self.norm(x)))))


class Blocks(nn.Module):
    """Equal blocks between an embedding and a head; the loss is computed by a method."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


@dataclass
class Seen:
    """What a run has computed, and what the compiler made of it."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    random: Tensor | None = None
    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    recomputed: tuple[str, ...] = ()
    """Modules that a budget has come to compute again."""


def batches(steps: int = STEPS, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)) for _ in range(steps)]


def loss_by_method(model: nn.Module, batch: Any) -> Tensor:
    return model.loss(batch)  # type: ignore[operator, no-any-return]


def loss_of_call(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    make: Callable[[], nn.Module],
    *,
    before: Callable[[Any], Any] = lambda model: model,
    after: Callable[[Any], Any] = lambda model: model,
    loss: Callable[[nn.Module, Any], Tensor] = loss_by_method,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    steps: int = STEPS,
    rows: int = 8,
    needs_sample: bool = False,
    **strategy: Any,
) -> Seen:
    """Train for some updates; `before` and `after` compile the model before fleet.distribute(...), or after it."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model = before(make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16-bit arithmetic is slow on most CPUs, and says so
        model, trained = fleet.distribute(
            model,
            optimizer(model.parameters()),
            fleet.DistributedStrategy(**strategy),
            sample=batches(1, rows)[0] if needs_sample else None,
            loss_fn=loss,
        )
    called, seen = after(model), Seen()
    torch.manual_seed(3)
    for batch in batches(steps, rows):
        report = trained.minimize(loss(called, batch))
        if report.loss is not None:
            seen.losses.append(report.loss)
    seen.weights = [tensor.detach().clone() for tensor in model.state_dict().values()]
    seen.random = torch.get_rng_state()
    seen.graphs, seen.breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    plan = trained.memory_plan
    seen.recomputed = () if plan is None else plan.recomputed
    return seen
