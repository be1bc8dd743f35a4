"""How a loop of the zoo is entered, and what it writes down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.oracles import Api


@dataclass
class Outcome:
    weights: Tensor
    """Of all the models of the loop, and of their averages: the same on all ranks."""
    seen: Tensor
    """Gradients, norms and scales that the loop looked at: the same on all ranks."""
    losses: list[float]
    """This rank's own."""
    buffers: Tensor
    """Statistics of BatchNorm; under fleetx the same on all ranks."""


@dataclass
class Notes:
    """What a loop writes down while it runs."""

    seen: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def loss(self, loss: Tensor) -> None:
        self.losses.append(loss.item())

    def look(self, value: Tensor | float) -> None:
        self.seen.append(torch.as_tensor(value).detach().flatten().double())

    def look_at_gradients(self, model: nn.Module) -> None:
        for p in model.parameters():
            if p.grad is not None:
                self.look(p.grad.clone())

    def outcome(self, *models: nn.Module) -> Outcome:
        weights = [p.detach().flatten().double() for model in models for p in model.parameters()]
        buffers = [buffer.flatten().double() for model in models for buffer in model.buffers()]
        nothing = torch.zeros(0).double()
        return Outcome(torch.cat(weights), torch.cat([nothing, *self.seen]), self.losses, torch.cat([nothing, *buffers]))


@dataclass(frozen=True)
class Loop:
    name: str
    run: Callable[[Api, int], Outcome]
    no_ddp: str
    """Why DDP cannot run it; empty where it can."""
    under: frozenset[str]
    """The parts of a strategy that it is run under as well."""
    find_unused: bool


LOOPS: dict[str, Loop] = {}


def loop(
    under: str = "", *, no_ddp: str = "", find_unused: bool = False, name: str = "", **settings: Any
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Enter a loop under its own name, or a variant of it under another."""

    def enter(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
        entered = name or run.__name__
        assert entered not in LOOPS
        LOOPS[entered] = Loop(
            entered, lambda api, rank: run(api, rank, **settings), no_ddp, frozenset(under.split()), find_unused
        )
        return run

    return enter
