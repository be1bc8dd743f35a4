"""Plannings of `auto` for tests: a small net with all that a step can change, and a picture of it to compare."""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import fleetx.fleet as face_of_fleet
from fleetx import fleet
from fleetx.auto import candidate, probe, run_measurements, subject, trial
from fleetx.auto.candidate import DENSE
from fleetx.auto.cost import Reducer
from fleetx.auto.link import measured_link
from fleetx.errors import FleetWarning
from fleetx.strategy import DistributedStrategy

WIDTH, CLASSES = 128, 4
"""A weight of one block is as large as DGC makes sparse, and worth factoring for PowerSGD."""


@contextlib.contextmanager
def short_measuring(*, few: bool = False, slow_from: float | None = None) -> Iterator[None]:
    """Timed as few times as can be, since no test here asks which plan is the fastest. `few`: one candidate of each kind.
    `slow_from`: so many times float32's time a step of bfloat16 must take to be left out as too slow."""
    with contextlib.ExitStack() as stack:

        def put(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        put(trial, "SECONDS", 0.0)
        for module in (probe, run_measurements):
            put(module, "TIMED", 1)
        put(probe, "FEW_TIMED", 1)
        put(run_measurements, "measured_link", partial(measured_link, sizes=(4096, 16384, 65536)))
        if few:
            few_kinds = [DENSE, Reducer.named("powersgd", 4), Reducer.named("dgc", 0.999), Reducer.named("localsgd", 2)]
            put(candidate, "offered", lambda context: few_kinds)
            put(candidate, "MERGES", (1, 2))
        if slow_from is not None:
            put(run_measurements, "FAR_SLOWER", slow_from)
        yield


class Restless(nn.Module):
    """Draws from all sources of random numbers, and writes to its buffer in every forward."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        drawn: Tensor = self.dropout(x) * (1 + 1e-3 * random.random() + 1e-3 * float(np.random.rand()))
        return drawn


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU())


def net(blocks: int = 3) -> nn.Sequential:
    """In training, but for one norm that the user has frozen."""
    torch.manual_seed(0)
    found = nn.Sequential(*(block() for _ in range(blocks)), *(nn.BatchNorm1d(WIDTH) for _ in range(2)), Restless())
    found[-2].eval()
    return found.append(nn.Linear(WIDTH, CLASSES))


def batch(index: int, rows: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(given[0]).float(), given[1])


def auto(**configs: Any) -> DistributedStrategy:
    return DistributedStrategy(auto=True, auto_configs=configs)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained_before(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int = 2) -> None:
    """By a plain loop, the same on all ranks."""
    for step in range(updates):
        loss_of(model, batch(90 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_after(model: nn.Module, optimizer: Any, rank: int, micro_steps: int = 8) -> list[Tensor]:
    for step in range(micro_steps):
        optimizer.minimize(loss_of(model, batch(10 * step + rank)))
    return [t.detach().clone() for t in model.state_dict().values()]


# --- a picture of all that a step may change --------------------------------------------------------------------------------

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    state = optimizer.state_dict()
    return {
        "values": {name: t.detach().clone() for name, t in model.state_dict().items()},
        "gradients": [name for name, p in params.items() if p.grad is not None],
        "modes": {name: module.training for name, module in modules.items()},
        "patched": [name for name, module in modules.items() if "forward" in vars(module)],
        "hooks": {name: [len(getattr(module, kind)) for kind in HOOKS] for name, module in modules.items()},
        "class": type(optimizer).__qualname__,
        "step": "step" in vars(optimizer),
        "state": {(key, name): _copied(value) for key, held in state["state"].items() for name, value in held.items()},
        "held": len(optimizer.state),
        "groups": state["param_groups"],
        "group dicts": [id(group) for group in optimizer.param_groups],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def hooks_of(model: nn.Module) -> int:
    """On parameters: of a pair that was given up there are to be none, since each holds its pair's gradients."""
    gc.collect()  # an exception and its frames hold each other, and with them a pair
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())  # type: ignore[attr-defined]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def changed(before: Any, after: Any, name: str = "") -> list[str]:
    """Where two pictures differ, to the bit."""
    if isinstance(before, Tensor):
        same = isinstance(after, Tensor) and before.dtype == after.dtype and torch.equal(before, after)
        return [] if same else [f"{name}: another tensor"]
    if isinstance(before, dict):
        keys = [f"{name}: keys {sorted(map(str, before))} became {sorted(map(str, after))}"] if set(before) != set(after) else []
        return keys + [line for key in before if key in after for line in changed(before[key], after[key], f"{name}.{key}")]
    if isinstance(before, np.ndarray):
        return [] if np.array_equal(before, after) else [f"{name}: another array"]
    if isinstance(before, list | tuple):
        if len(before) != len(after):
            return [f"{name}: {before} became {after}"]
        return [line for i, pair in enumerate(zip(before, after, strict=True)) for line in changed(*pair, f"{name}[{i}]")]
    return [] if before == after else [f"{name}: {before} became {after}"]


@contextlib.contextmanager
def pictures_before_binding(optimizer: torch.optim.Optimizer) -> Iterator[list[dict[str, Any]]]:
    """One of the moment when planning is over, and what was chosen is about to be bound."""
    found: list[dict[str, Any]] = []
    real = face_of_fleet.bind

    def bind(model: nn.Module, *args: Any, **given: Any) -> None:
        found.append(picture(model, optimizer))
        real(model, *args, **given)

    with mock.patch.object(face_of_fleet, "bind", bind):
        yield found


@contextlib.contextmanager
def strategies_tried(found: list[DistributedStrategy]) -> Iterator[None]:
    """Every one that steps are run by comes into the list, before they are."""
    real = subject.bind

    def bind(model: nn.Module, face: Any, strategy: DistributedStrategy, **given: Any) -> None:
        found.append(strategy)
        real(model, face, strategy, **given)

    with mock.patch.object(subject, "bind", bind):
        yield


def parts_of(strategies: list[DistributedStrategy]) -> list[str]:
    return [" ".join(part.name for part in strategy.parts()) or "plain" for strategy in strategies]


def bound_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: DistributedStrategy, sample: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        return fleet.distribute(model, optimizer, strategy, sample=sample, loss_fn=loss_of)[1]


def planned(model: nn.Module, optimizer: torch.optim.Optimizer, sample: Any, *, loss_fn: Any = loss_of, **configs: Any) -> Any:
    """The optimizer of a pair that `auto` has bound. What parts warn of, a slow bfloat16 above all, was measured and chosen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        return fleet.distribute(model, optimizer, auto(**configs), sample=sample, loss_fn=loss_fn)[1]
