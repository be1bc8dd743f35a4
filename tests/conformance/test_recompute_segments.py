"""Segments: rows of units that keep one input among them. They lower the peak, by torch's profiler, and change no bit."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import ConfigError, FleetWarning
from tests.helpers.budget_nets import allocated_in, lasting_bytes
from tests.helpers.harness import raised
from tests.helpers.recompute_nets import WIDTH, Inner, Norm
from tests.helpers.recompute_runs import random_now, rows, seed

BLOCKS = 12
ROWS = 256
RANDOM_STATE = 5056
"""Bytes of torch's generator that each unit computed again keeps: no operation makes them, so they are not counted."""
AMP = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}


@pytest.fixture(autouse=True)
def _alone(alone: None) -> None:
    """Every test here."""


# --- chains of blocks -----------------------------------------------------------------------------------------------------------


class Masked(Inner):
    """Takes a mask beside its input, by name, and a number that is no tensor."""

    def forward(self, x: Tensor, mask: Tensor, *, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        y = super().forward(x * mask) * scale
        return y if shift is None else y + shift


class Paired(Inner):
    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x[0]), x[1] + 1


class Norms(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Norm, *, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(make() for _ in range(blocks)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Masks(Norms):
    """The mask and the shift are made once, and go to every block."""

    def __init__(self) -> None:
        super().__init__(Masked)

    def forward(self, x: Tensor) -> Tensor:
        mask, shift = (x > -1).float(), x.mean(0)
        for i, block in enumerate(self.blocks):
            x = block(x, mask=mask, scale=0.9, shift=shift) if i % 2 else block(x, mask)
        return self.last(x)


class ByName(Norms):
    """The block before gives what the next one takes as a keyword."""

    def __init__(self) -> None:
        super().__init__(Inner)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return self.last(x)


class Glued(Norms):
    """Something between blocks, so that none is given just what another returned; every third time nothing is."""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x if i % 3 else torch.sin(x))
        return self.last(x)


class Halved(Norms):
    """The first half in 32 bits, whatever is around."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            for block in self.blocks[: BLOCKS // 2]:
                x = block(x)
        for block in self.blocks[BLOCKS // 2 :]:
            x = block(x)
        return self.last(x)


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "norms and dropout": Norms,
    "masks": Masks,
    "by name": ByName,
    "glue": Glued,
    "half in float32": Halved,
}


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def distribute(model: nn.Module, budget: int | None, *, loss_fn: Any = cross_entropy, count: int = ROWS, **strategy: Any) -> Any:
    """With None, without recompute."""
    if budget is not None:
        strategy |= {"recompute": True, "recompute_configs": {"budget": budget, "checkpoints": ["blocks.*"]}}
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16-bit arithmetic is slow on most CPUs, and says so
        chosen = fleet.DistributedStrategy(**strategy)
        if budget is None:
            return fleet.distribute(model, inner, chosen)
        return fleet.distribute(model, inner, chosen, sample=rows(0, count), loss_fn=loss_fn)


_smallest: dict[tuple[Callable[[], nn.Module], str], int] = {}
"""The key holds the function: its address alone would be given to the next one."""


def smallest(build: Callable[[], nn.Module], **settings: Any) -> int:
    """As the refusal of a budget of one byte tells it."""
    case = build, repr(settings)
    if case not in _smallest:
        _smallest[case] = _told(build, settings)
    return _smallest[case]


def _told(build: Callable[[], nn.Module], settings: dict[str, Any]) -> int:
    with pytest.raises(ConfigError) as refused:
        distribute(build(), 1, **settings)
    found = re.search(r'Write "budget": (\d+)', str(refused.value))
    assert found is not None, refused.value
    return int(found[1])


def train(model: nn.Module, optimizer: Any, *, micro_steps: int, loss_fn: Any = cross_entropy) -> list[float]:
    losses = []
    for index in range(micro_steps):
        loss = loss_fn(model, rows(index, 24))
        losses.append(loss.item())
        optimizer.minimize(loss)
    return losses


def assert_trains_the_same(
    build: Callable[[], nn.Module], loop: Any = train, *, micro_steps: int = 5, loss_fn: Any = cross_entropy, **settings: Any
) -> Any:
    """Five updates with segments and without recompute: losses, weights, buffers, momentum and all random numbers."""
    seed()
    least = smallest(build, loss_fn=loss_fn, **settings)
    found: list[Any] = []
    plan: Any = None
    for budget in (least, None):
        seed()
        model, optimizer = distribute(build(), budget, loss_fn=loss_fn, **settings)
        plan = plan or optimizer.memory_plan
        seed(1)
        losses = loop(model, optimizer, micro_steps=micro_steps, loss_fn=loss_fn)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        found.append((losses, state, optimizer.state_dict()["state"], random_now()))
        del optimizer
    assert found[0][0] == found[1][0] and found[0][0][0] != found[0][0][-1]
    torch.testing.assert_close(found[0][1:3], found[1][1:3], rtol=0, atol=0)
    assert found[0][3] == found[1][3]
    return plan


# --- to the bit -----------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": AMP,
    "merged": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
}


CASES = [(name, "plain") for name in CHAINS] + [
    ("norms and dropout", "bfloat16"),
    ("half in float32", "bfloat16"),
    ("glue", "merged"),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_five_updates_with_segments_are_those_without_recompute(name: str, settings: str) -> None:
    plan = assert_trains_the_same(CHAINS[name], micro_steps=10 if settings == "merged" else 5, **SETTINGS[settings])
    assert plan.segments and all(len(segment) > 1 for segment in plan.segments)
    joined = [unit for segment in plan.segments for unit in segment]
    assert len(set(joined)) == len(joined) and set(joined) <= set(plan.recomputed)
    if name == "glue":
        assert not any(f"blocks.{i}" in segment[1:] for segment in plan.segments for i in range(0, BLOCKS, 3))


def test_blocks_that_return_tuples_are_never_joined_and_train_the_same() -> None:
    class Pairs(Norms):
        def __init__(self) -> None:
            super().__init__(Paired)

        def forward(self, x: Tensor) -> Tensor:
            both = (x, x)
            for block in self.blocks:
                both = block(both)
            return self.last(both[0] * both[1])

    plan = assert_trains_the_same(Pairs)
    assert plan.segments == () and plan.recomputed


def two_backwards(model: nn.Module, optimizer: Any, *, micro_steps: int, loss_fn: Any) -> list[float]:
    losses = []
    for index in range(micro_steps):
        loss = loss_fn(model, rows(index, 24))
        losses.append(loss.item())
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_two_backwards_of_one_forward_are_those_without_recompute() -> None:
    assert assert_trains_the_same(Norms, two_backwards).segments


def two_forwards(model: nn.Module, batch: Any) -> Tensor:
    """The graph of the second is alive while the first's backward runs; they share the running statistics."""
    first = model(batch[0])
    return F.cross_entropy(first + model(batch[0].flip(0)), batch[1]) + first.square().mean()


def test_a_model_called_twice_in_one_loss_trains_the_same() -> None:
    plan = assert_trains_the_same(lambda: Norms(blocks=6), loss_fn=two_forwards)
    assert plan.recomputed and plan.segments == ()  # units that are called twice are never joined


def test_so_does_one_that_was_planned_by_one_call_and_is_called_twice_later() -> None:
    def loop(model: nn.Module, optimizer: Any, *, micro_steps: int, loss_fn: Any) -> list[float]:
        return train(model, optimizer, micro_steps=micro_steps, loss_fn=two_forwards)

    assert assert_trains_the_same(Norms, loop).segments


def other_loops(kind: str) -> Any:
    def loop(model: nn.Module, optimizer: Any, *, micro_steps: int, loss_fn: Any) -> list[float]:
        losses = []
        for index in range(micro_steps):
            x, y = rows(index, 24 + index)  # of another length each time
            if kind == "evaluated between":
                with torch.no_grad():
                    model.eval()
                    losses.append(model(x).sum().item())
                    model.train()
            if kind == "a graph thrown away":
                model(x).sum()
            out = model(x.requires_grad_(kind == "input has gradients"))
            loss = F.cross_entropy(out, y)
            if kind == "evaluated before backward":
                with torch.no_grad():
                    losses.append(model(x).sum().item())
            if kind == "gradients asked for":
                losses += [g.sum().item() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
            losses.append(loss.item())
            optimizer.minimize(loss)
            if kind == "input has gradients":
                losses.append(x.grad.sum().item())
        return losses

    return loop


@pytest.mark.parametrize(
    "kind",
    ["evaluated between", "evaluated before backward", "a graph thrown away", "input has gradients", "gradients asked for"],
)
def test_loops_of_other_forms_train_the_same(kind: str) -> None:
    assert assert_trains_the_same(Norms, other_loops(kind)).segments


# --- changed in place -----------------------------------------------------------------------------------------------------------


class Doubling(Norms):
    """Once `doubles` is set, a block's output is changed in place before the next block is given it."""

    doubles: str | None = None

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.doubles == "always" or (self.doubles == "some" and i == 5):
                x.mul_(2)
            if self.doubles == "a view":
                x.view(-1)[::2].mul_(2)
        return self.last(x)


@pytest.mark.parametrize("doubles", ["always", "some", "a view"])
def test_outputs_changed_in_place_between_blocks_are_right(doubles: str) -> None:
    def build() -> nn.Module:
        model = Doubling()
        model.doubles = doubles
        return model

    plan = assert_trains_the_same(build)
    assert plan.recomputed
    if doubles == "always":
        assert plan.segments == ()


@pytest.mark.parametrize("doubles", ["always", "some", "a view"])
def test_so_they_are_where_the_change_begins_after_the_plan_was_made(doubles: str) -> None:
    def loop(model: Any, optimizer: Any, *, micro_steps: int, loss_fn: Any) -> list[float]:
        model.doubles = doubles
        return train(model, optimizer, micro_steps=micro_steps)

    assert assert_trains_the_same(Doubling, loop).segments


class ChangedLater(Norms):
    """A block's output is changed after the next block has had it: plain autograd itself may not go back through that."""

    later = False

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 4:
                kept = x
        if self.later:
            with torch.no_grad():
                kept.mul_(2)
        return self.last(x)


def test_an_output_changed_after_the_next_block_had_it_is_refused_as_autograd_does_or_not_needed() -> None:
    seed()
    least = smallest(ChangedLater)
    trained = {}
    for budget, later in ((None, True), (None, False), (least, True)):
        seed()
        model, optimizer = distribute(ChangedLater(), budget)
        optimizer.minimize(cross_entropy(model, rows(0, 24)))
        model.later = later
        if budget is None and later:
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                optimizer.minimize(cross_entropy(model, rows(1, 24)))
        else:
            told = raised(lambda model=model, optimizer=optimizer: optimizer.minimize(cross_entropy(model, rows(1, 24))))
            trained[budget] = told, [p.detach().clone() for p in model.parameters()]
        del optimizer
        gc.collect()
    # Where the plan, which depends on measured times, has the block in a segment, its input is not kept, but made again, and the
    # change is of no account, as it is for the loss.
    if trained[least][0] == "nothing raised":
        torch.testing.assert_close(trained[least][1], trained[None][1], rtol=0, atol=0)
    else:
        assert "was changed in place after its forward" in trained[least][0]


class Collecting(Norms):
    """Holds every block's output until its own forward is over, as models that can return them all do."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = [x]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return self.last(hidden[-1])


def test_a_model_that_holds_all_outputs_until_forward_ends_trains_the_same_by_the_least_budget() -> None:
    assert assert_trains_the_same(Collecting).segments


# --- less memory ----------------------------------------------------------------------------------------------------------------


def own_peak(model: nn.Module, optimizer: Any, batch: Any) -> int:
    optimizer.minimize(cross_entropy(model, batch))
    before = lasting_bytes(model, optimizer, batch)
    return before + allocated_in(lambda: optimizer.minimize(cross_entropy(model, batch))).peak


class Thin(nn.Module):
    """A block whose boundary is as large as what it saves: nothing is won by computing it again on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("make", [Norm, Inner, Thin])
def test_segments_lower_the_peak_below_that_of_every_block_computed_again(make: Callable[[], nn.Module]) -> None:
    count = 4096
    seed()
    least = smallest(lambda: Norms(make), count=count)
    peaks = {}
    for kind in ("plain", "every block", "segments"):
        seed()
        model = Norms(make)
        if kind == "every block":
            inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            model, optimizer = fleet.distribute(
                model, inner, fleet.DistributedStrategy(recompute=True, recompute_configs={"checkpoints": ["blocks.*"]})
            )
        else:
            model, optimizer = distribute(model, least if kind == "segments" else None, count=count)
        peaks[kind] = own_peak(model, optimizer, rows(0, count))
        if kind == "segments":
            plan = optimizer.memory_plan
            assert plan.segments and plan.real_bytes <= least
            assert abs(peaks[kind] - plan.real_bytes) <= 0.03 * plan.real_bytes + RANDOM_STATE * len(plan.recomputed)
        del optimizer
        gc.collect()
    print(f"FIGURE {make.__name__} {peaks} least {least}")
    assert peaks["segments"] < 0.85 * peaks["every block"] < peaks["plain"]


def test_a_budget_that_needs_no_segments_has_none() -> None:
    seed()
    least = smallest(Norms)
    counts = []
    for share in (1.0, 1.7, 4.0, 100.0):
        seed()
        _, optimizer = distribute(Norms(), int(share * least))
        plan = optimizer.memory_plan
        assert plan.real_bytes <= plan.budget
        counts.append((sum(map(len, plan.segments)), len(plan.recomputed)))
        del optimizer
        gc.collect()
    assert counts[0][0] > 0 and counts[-1] == (0, 0) and counts[-2][0] == 0


def test_the_plans_sentence_counts_its_segments() -> None:
    seed()
    _, optimizer = distribute(Norms(), smallest(Norms))
    plan = optimizer.memory_plan
    assert f"{sum(map(len, plan.segments))} of them in {len(plan.segments)} segments" in str(plan)
