"""A budget that may use host memory: kept to by torch's profiler, predicted, smaller than any without, and to the bit."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.config.text import binary
from fleetx.errors import ConfigError, FleetWarning
from tests.helpers.budget_runs import AMP, own_peak
from tests.helpers.parking_runs import EarlyMover, LateMover, use_mover
from tests.helpers.recompute_nets import NETS, WIDTH, Inner
from tests.helpers.recompute_runs import random_now, rows, seed

BLOCKS, ROWS = 8, 512
INPUT = ROWS * WIDTH * 4
"""Bytes between two blocks."""
RANDOM_STATE = 5056
"""Bytes of torch's generator that each unit computed again keeps, and once more while one is: they are not counted."""
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}


@pytest.fixture(autouse=True)
def _alone(alone: None) -> None:
    """Every test here."""


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> EarlyMover:
    return use_mover(monkeypatch, EarlyMover())


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Inner() for _ in range(BLOCKS)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Collecting(Row):
    """Holds every block's output until its forward is over."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = [x]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return self.last(hidden[-1])


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def distribute(model: nn.Module, budget: int | None, *, offload: bool = True, **strategy: Any) -> Any:
    """With None, without recompute."""
    if budget is not None:
        strategy |= {"recompute": True, "recompute_configs": {"budget": budget, "offload": offload}}
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    chosen = fleet.DistributedStrategy(**strategy)
    if budget is None:
        return fleet.distribute(model, inner, chosen)
    return fleet.distribute(model, inner, chosen, sample=rows(0, ROWS), loss_fn=cross_entropy)


def least(build: Callable[[], nn.Module], **settings: Any) -> int:
    """As the refusal of a budget of one byte tells it."""
    seed()
    with pytest.raises(ConfigError) as refused:
        distribute(build(), 1, **settings)
    found = re.search(r'Write "budget": (\d+)', str(refused.value))
    assert found is not None, refused.value
    del refused
    gc.collect()
    return int(found[1])


@pytest.mark.parametrize("build", [Row, Collecting, NETS["u-net"].build], ids=["row", "collecting", "u-net"])
def test_budgets_below_all_those_without_host_memory_hold_and_are_predicted(build: Callable[[], nn.Module], early: Any) -> None:
    low, high = least(build), least(build, offload=False)
    assert low <= high and (build is not Row or low < high - INPUT)
    for budget in sorted({low, (low + high) // 2}):
        seed()
        model, optimizer = distribute(build(), budget)
        plan = optimizer.memory_plan
        real = own_peak(model, optimizer, rows(0, ROWS))
        print(f"FIGURE {build.__name__} {budget} predicted {plan.predicted_bytes} real {plan.real_bytes} own {real}")
        assert plan.parked and set(plan.parked) <= set(plan.recomputed) and plan.real_bytes <= budget
        assert abs(plan.predicted_bytes - plan.real_bytes) <= 0.01 * plan.real_bytes
        assert abs(plan.real_bytes - real) <= 0.01 * real + RANDOM_STATE * (1 + len(plan.recomputed))
        del optimizer
        gc.collect()


def train(budget: int | None, **settings: Any) -> tuple[Any, Any]:
    seed()
    model, optimizer = distribute(Row(), budget, **settings)
    plan = optimizer.memory_plan
    seed(1)
    losses = []
    for index in range(10 if "gradient_merge" in settings else 5):
        loss = cross_entropy(model, rows(index, 24 + index))
        losses.append(loss.item())
        optimizer.minimize(loss)
    kept = (
        losses,
        {name: value.clone() for name, value in model.state_dict().items()},
        optimizer.state_dict()["state"],
        random_now(),
    )
    del optimizer
    gc.collect()
    return kept, plan


@pytest.mark.parametrize("settings", [{}, AMP["bfloat16"], MERGED], ids=["plain", "bfloat16", "merged"])
@pytest.mark.filterwarnings("ignore:amp:fleetx.errors.FleetWarning")
def test_five_updates_by_such_a_budget_are_those_without_recompute(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mover(monkeypatch, EarlyMover())
    budget = least(Row, **settings)
    theirs, _ = train(None, **settings)
    for mover in (EarlyMover(), LateMover()):
        use_mover(monkeypatch, mover)
        ours, plan = train(int(1.02 * budget), **settings)
        assert plan.parked and mover.out and mover.back
        assert ours[0] == theirs[0] and ours[3] == theirs[3]
        torch.testing.assert_close(ours[1:3], theirs[1:3], rtol=0, atol=0)


def test_host_memory_is_used_only_where_it_is_needed_and_the_sentence_tells_of_it(early: EarlyMover) -> None:
    low, high = least(Row), least(Row, offload=False)
    _, optimizer = distribute(Row(), 4 * high)
    plan = optimizer.memory_plan
    assert not plan.parked and plan.host_bytes == 0 and "host memory" not in str(plan)
    del optimizer
    _, optimizer = distribute(Row(), low)
    plan = optimizer.memory_plan
    assert plan.host_bytes == len(plan.parked) * INPUT
    assert f"{len(plan.parked)} of them with inputs in host memory ({binary(plan.host_bytes)})" in str(plan)
    assert {moment.unit for moment in plan.moments if moment.parks} == set(plan.parked)


def test_over_a_slow_wire_segments_are_taken_instead_and_host_memory_where_they_are_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(EarlyMover):
        def bytes_per_second(self) -> float:
            return INPUT / 10  # ten seconds an input

    use_mover(monkeypatch, Slow())
    low, high = least(Row), least(Row, offload=False)
    assert low < high
    for budget, needs_host in ((low, True), (int(1.02 * high), False)):
        seed()
        _, optimizer = distribute(Row(), budget)
        plan = optimizer.memory_plan
        assert bool(plan.parked) == needs_host and (plan.segments or needs_host)
        assert plan.seconds_added > 19 or not needs_host
        del optimizer
        gc.collect()


def test_the_batch_finder_reaches_further_with_host_memory(early: EarlyMover) -> None:
    found = []
    for offload in (False, True):
        seed()
        model = Row()
        strategy = fleet.DistributedStrategy(recompute=True, recompute_configs={"offload": offload, "checkpoints": ["blocks.*"]})
        found.append(
            fleet.find_batch(
                model,
                torch.optim.SGD(model.parameters(), lr=0.05),
                strategy,
                sample=rows(0, 256),
                loss_fn=cross_entropy,
                budget=400_000,
            )
        )
    assert found[1].most > 1.05 * found[0].most
    assert found[1].largest.strategy.recompute_configs["offload"]
    assert early.out


def test_on_a_cpu_the_batch_finder_warns_that_there_is_nothing_to_move() -> None:
    seed()
    model = Row()
    strategy = fleet.DistributedStrategy(recompute=True, recompute_configs={"offload": True})
    with pytest.warns(FleetWarning, match="there is nothing to move") as told:
        fleet.find_batch(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            strategy,
            sample=rows(0, 64),
            loss_fn=cross_entropy,
            budget=300_000,
        )
    assert len(told) == 1
