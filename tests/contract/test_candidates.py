"""What every part says of itself to `auto`: candidates that can be built, and a wire cost that is what the counter counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.auto.candidate import offered, parts_in_order
from fleetx.auto.cost import Reducer, settings_of
from fleetx.auto.run_measurements import gradients_of
from fleetx.dist.predicted_cost import Cost, Link
from fleetx.engine.setup.conflicts import check_parts
from fleetx.engine.slots import PlanContext, Slot
from fleetx.strategies import catalogue
from fleetx.strategy import DistributedStrategy
from tests.helpers.harness import run_ranks

PARTS = catalogue()
REDUCERS = [name for name, part in PARTS.items() if Slot.REDUCE in part().claims()]
SHAPES = ((512, 512), (300,), (64, 32, 3, 3))
CONTEXT = PlanContext(ranks=8, shapes=SHAPES)
TAIL_BYTES = 256
"""Flags of an update, and at an averaging one row of numbers, beside what is predicted."""


def test_candidates_have_names_of_their_own_and_the_least_risky_come_first() -> None:
    labels = [one.label for one in offered(CONTEXT)]
    assert len(set(labels)) == len(labels) and labels[0] == "dense"
    risks = [one.risk for one in offered(CONTEXT)]
    assert risks == sorted(risks, key=list(type(risks[0])).index)
    assert {part.name for part in parts_in_order()} == set(PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_a_candidate_is_a_part_that_goes_with_precision_merging_and_recompute(name: str) -> None:
    for one in PARTS[name].candidates(CONTEXT):
        assert isinstance(one, PARTS[name]) and one.no_effect() is None
        strategy = DistributedStrategy(amp=True, gradient_merge=True, recompute=True, **settings_of([one]))
        assert one in strategy.parts()
        check_parts(strategy.parts())


@pytest.mark.parametrize("name", PARTS)
def test_a_steady_part_has_the_period_asked_for_and_stays_as_it_is(name: str) -> None:
    for one in [PARTS[name](), *PARTS[name].candidates(CONTEXT)]:
        steady = one.steady(3)
        assert steady.steady(3) == steady and steady.claims() == one.claims()
        assert steady.updates_per_exchange() == (3 if Slot.AVERAGE in one.claims() else 1)
        assert one.steady().updates_per_exchange() == 1


@pytest.mark.parametrize("name", REDUCERS)
def test_one_rank_sends_nothing_and_a_faster_link_takes_less_for_the_same_bytes(name: str) -> None:
    for one in [PARTS[name](), *PARTS[name].candidates(CONTEXT)]:
        assert one.wire_cost(SHAPES, Link(1, 1e6, 1.0)) == Cost(0.0, 0.0)
        slow, fast = one.wire_cost(SHAPES, Link(8, 1e6, 1e-3)), one.wire_cost(SHAPES, Link(8, 1e7, 1e-3))
        assert slow.bytes_sent == fast.bytes_sent > 0 and slow.seconds > fast.seconds > 0


def _sent(rank: int, labels: list[tuple[str, dict[str, Any]]]) -> list[tuple[float, float]]:
    """Bytes of one update as predicted, and as counted in the third."""
    found = []
    for kind, configs in labels:
        part = PARTS[kind](**configs).steady()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        strategy = DistributedStrategy(desync_check_steps=0, **settings_of([part]))
        model, ours = fleet.distribute(model, optimizer, strategy)
        torch.manual_seed(1 + rank)
        reports = [ours.minimize(model(torch.randn(8, 256)).square().mean()) for _ in range(3)]
        predicted = part.wire_cost(gradients_of(model.parameters()).shapes, Link(2, 1.0)).bytes_sent
        found.append((predicted, reports[-1].bytes_sent))
    return found


def test_the_bytes_that_a_part_predicts_are_those_that_are_counted() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in REDUCERS]
    cases += [("dgc", {"min_numel": 100, "sparsity": [0.9]}), ("powersgd", {"rank": 2, "min_compression": 1.0})]
    for case, (predicted, counted) in zip(cases, run_ranks(_sent, 2, cases)[0], strict=True):
        assert counted == pytest.approx(predicted, abs=TAIL_BYTES), case


def test_a_reducer_is_known_by_its_label() -> None:
    assert Reducer.named("localsgd", 4) == Reducer(PARTS["localsgd"](k_steps=4, begin_step=9))  # type: ignore[call-arg]
    assert Reducer.named("localsgd", 4) != Reducer.named("localsgd", 8) != Reducer()
