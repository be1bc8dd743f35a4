"""Training with and without recompute: every number of a run is kept, to be compared to the bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.recompute_nets import WIDTH, Net


@dataclass
class Trace:
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    """Parameters and buffers after each update."""
    random: list[tuple[bytes, Any, Any]] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)
    """How often each module's forward ran, first or again."""
    collectives: list[tuple[str, int]] = field(default_factory=list)
    """In order, with their bytes: each rank must meet the others in the same."""


def seed(value: int = 0) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def random_now() -> tuple[bytes, Any, Any]:
    numpy = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy


def rows(index: int, count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(count, WIDTH, generator=generator)
    return x, torch.randint(0, 4, (count,), generator=generator)


def distribute(
    model: nn.Module, recompute: list[str] | None, optimizer: Any = None, *, offload: bool = False, **strategy: Any
) -> Any:
    """With None, without recompute."""
    if recompute is not None:
        strategy |= {"recompute": True, "recompute_configs": {"checkpoints": recompute, "offload": offload}}
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16-bit arithmetic is slow on most CPUs, and says so
        return fleet.distribute(model, inner, fleet.DistributedStrategy(**strategy))


def count_runs(model: nn.Module, trace: Trace) -> None:
    """Of what is not a norm or a leaf: around the module's own forward, inside all patches."""
    for name, module in model.named_modules():
        if not name or not any(True for _ in module.children()):
            continue

        def counted(*args: Any, _name: str = name, _forward: Any = module.forward, **kwargs: Any) -> Any:
            trace.runs[_name] = trace.runs.get(_name, 0) + 1
            return _forward(*args, **kwargs)

        module.forward = counted


@contextmanager
def noted_collectives(comm: Any, trace: Trace) -> Iterator[None]:
    def noted(kind: str, call: Any) -> Any:
        def around(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            trace.collectives.append((kind, tensor.nbytes))
            return call(tensor, *args, **kwargs)

        return around

    kinds = ("all_reduce", "all_gather", "broadcast")
    for kind in kinds:
        setattr(comm, kind, noted(kind, getattr(comm, kind)))
    try:
        yield
    finally:
        for kind in kinds:
            delattr(comm, kind)


def train(
    net: Net, recompute: bool, *, rank: int = 0, size: int = 1, updates: int = 5, merged: int = 1, **strategy: Any
) -> Trace:
    """Five updates; of each the loss, all gradients, the whole state, and all random generators."""
    seed()
    model = net.build()
    trace = Trace()
    count_runs(model, trace)
    model, optimizer = distribute(model, list(net.units) if recompute else None, **strategy)
    seed(rank + 1)
    with noted_collectives(optimizer.pipeline.comm, trace):
        for micro_step in range(updates * merged):
            one_micro_step(model, optimizer, trace, *rows(micro_step * size + rank))
    return trace


def one_micro_step(model: nn.Module, optimizer: Any, trace: Trace, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    trace.losses.append(loss.detach())
    optimizer.backward(loss)
    if optimizer.due:
        trace.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    report = optimizer.step()
    optimizer.zero_grad()
    trace.bytes_sent.append(report.bytes_sent)
    trace.states.append({name: value.clone() for name, value in model.state_dict().items()})
    trace.random.append(random_now())


def assert_same(ours: Trace, theirs: Trace) -> None:
    """To the bit: also NaNs in the same places."""
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(ours.losses, theirs.losses, **exact)
    torch.testing.assert_close(ours.gradients, theirs.gradients, **exact)
    torch.testing.assert_close(ours.states, theirs.states, **exact)
    assert ours.random == theirs.random
    assert ours.collectives == theirs.collectives
    assert ours.bytes_sent == theirs.bytes_sent


def assert_ran_again(ours: Trace, theirs: Trace) -> None:
    """Where it is only dropped and never computed again, equality would prove nothing."""
    assert any(runs > theirs.runs[name] for name, runs in ours.runs.items()), "no unit ran again"
    first, last = theirs.states[0], theirs.states[-1]
    assert not all(torch.equal(first[name], last[name]) for name in first if name.endswith("weight")), "nothing was learnt"


# --- loops of any form --------------------------------------------------------------------------------------------------------

Loop = Callable[[Any, Any], None]
"""Of a distributed model and its optimizer."""


def loss_of(model: nn.Module, index: int) -> Tensor:
    x, y = rows(index)
    return F.cross_entropy(model(x), y)


def three_steps(model: Any, optimizer: Any) -> None:
    for step in range(3):
        optimizer.minimize(loss_of(model, step))


def same_in_loop(build: Callable[[], nn.Module], loop: Loop = three_steps, **strategy: Any) -> None:
    """The whole state and all random numbers after the loop are the same with and without recompute of `unit`."""
    found = []
    for recompute in (None, ["unit"]):
        seed()
        model, optimizer = distribute(build(), recompute, **strategy)
        seed(1)
        loop(model, optimizer)
        found.append(({name: value.clone() for name, value in model.state_dict().items()}, random_now()))
        del optimizer
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
    assert found[1][1] == found[0][1]


# --- loops that several files train with --------------------------------------------------------------------------------------


def one_loss_twice(model: Any, optimizer: Any) -> None:
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def gradient_penalty(model: Any, optimizer: Any) -> None:
    for step in range(3):
        x, y = rows(step)
        out = model(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        optimizer.minimize(F.cross_entropy(out, y) + slope.square().mean())


def evaluated_before_backward(model: Any, optimizer: Any) -> None:
    for step in range(3):
        loss = loss_of(model, step)
        model.eval()
        with torch.no_grad():
            loss_of(model, 10 + step)
        model.train()
        optimizer.minimize(loss)
