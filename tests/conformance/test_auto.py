"""`auto` in one process: plain is an answer, memory is kept to as predicted, and what is left is what was there."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.auto import search
from fleetx.auto.plan import load
from fleetx.errors import ConfigError
from fleetx.strategy import DistributedStrategy
from tests.helpers.auto_runs import (
    WIDTH,
    auto,
    batch,
    bound_by_hand,
    changed,
    hooks_of,
    loss_of,
    net,
    picture,
    pictures_before_binding,
    planned,
    sgd,
    short_measuring,
    trained_after,
    trained_before,
)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def _short() -> Iterator[None]:
    with short_measuring(few=True):
        yield


def seeded() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


# --- plain is an answer -----------------------------------------------------------------------------------------------------


def test_one_rank_with_all_the_memory_it_wants_trains_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    model = net(1)
    plan = planned(model, sgd(model), batch(0), risk="exact").plan
    assert plan.strategy == DistributedStrategy() and plan.chosen == "fp32" and plan.micro_batch == 0 and plan.merge_steps == 1
    assert "one rank sends nothing" in plan.rejected["reducers"]
    assert re.search(r"not needed: the step takes [\d.]+ [KM]iB, and no limit was given", plan.rejected["recompute"])
    assert str(plan) in capsys.readouterr().out
    assert 0 < plan.seconds < 60


def test_settings_that_are_no_part_are_kept() -> None:
    model = net(1)
    strategy = DistributedStrategy(auto=True, auto_configs={"risk": "exact"}, fuse_grad_size_in_MB=5, on_nan_inf="skip")
    plan = fleet.distribute(model, sgd(model), strategy, sample=batch(0), loss_fn=loss_of)[1].plan
    assert plan.strategy == DistributedStrategy(fuse_grad_size_in_MB=5, on_nan_inf="skip")


def test_a_kept_plan_does_not_bring_back_settings_that_were_changed_since(tmp_path: Path) -> None:
    found = []
    for size in (5, 7):
        model, file = net(1), str(tmp_path / "plan.json")
        strategy = DistributedStrategy(auto=True, auto_configs={"risk": "exact", "plan": file}, fuse_grad_size_in_MB=size)
        found.append(fleet.distribute(model, sgd(model), strategy, sample=batch(0), loss_fn=loss_of)[1].plan.strategy)
    assert [strategy.fuse_grad_size_in_MB for strategy in found] == [5, 7]


# --- memory -----------------------------------------------------------------------------------------------------------------

ROWS = 256


def plain_peak() -> int:
    model = net(3)
    plan = planned(model, sgd(model), batch(0, ROWS), risk="exact").plan
    assert plan.rows[0].measured_bytes == pytest.approx(plan.rows[0].predicted_bytes, rel=0.05)
    return int(plan.rows[0].measured_bytes)


def test_a_limit_below_the_plain_peak_is_kept_to_by_recompute_and_nothing_is_left_behind() -> None:
    limit = int(0.85 * plain_peak())
    seeded()
    model = net(3)
    optimizer = sgd(model)
    trained_before(model, optimizer)
    before = picture(model, optimizer)
    with pictures_before_binding(optimizer) as pictures:
        ours = planned(model, optimizer, batch(0, ROWS), risk="schedule", trials=20, memory=limit)
    assert changed(before, pictures[0]) == []
    assert ours.plan.rows
    for row in ours.plan.rows:
        assert row.measured_bytes == pytest.approx(row.predicted_bytes, rel=0.05), row.name
        assert row.measured_bytes <= limit, row.name
    fp32 = [row for row in ours.plan.rows if row.name.startswith("fp32")]
    assert fp32 and all("recompute" in row.name for row in fp32)
    weights = trained_after(model, ours, 0)

    seeded()
    twin = net(3)
    theirs = sgd(twin)
    trained_before(twin, theirs)
    by_hand = bound_by_hand(twin, theirs, ours.plan.strategy, batch(0, ROWS))
    assert all(torch.equal(a, b) for a, b in zip(weights, trained_after(twin, by_hand, 0), strict=True))


@pytest.mark.parametrize("held_share", [1.01, 1.1])
def test_a_plan_that_takes_more_when_it_runs_is_tried_again_with_a_smaller_budget(
    held_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As allocators do, which hold more than is in use; here the first run of recompute is said to."""
    model = net(3)
    plain = planned(model, sgd(model), batch(0, ROWS), risk="exact").plan.row("fp32")
    limit = int(0.9 * plain.measured_bytes)
    budgets: list[Any] = []

    def tried(subject: Any, candidate: Any, **given: Any) -> Any:
        found = real(subject, candidate, **given)
        if candidate.recomputes:
            budgets.append(given["memory"])
            held = int(held_share * limit) if len(budgets) == 1 else found.held_bytes
            return replace(found, held_bytes=held)
        return found

    real = search.tried
    monkeypatch.setattr(search, "tried", tried)
    model = net(3)
    plan = planned(model, sgd(model), batch(0, ROWS), risk="exact", memory=limit).plan
    assert budgets[0] == limit and budgets[1] == limit - int(max(1.5 * (int(held_share * limit) - limit), 0.02 * limit))
    row = plan.row(plan.chosen)
    assert plan.strategy.recompute_configs["budget"] == budgets[1] and row.measured_bytes <= budgets[1]
    assert row.predicted_bytes == pytest.approx(row.measured_bytes, rel=0.05)  # of the plan that ran, not of the first one


def test_a_limit_that_nothing_keeps_to_is_refused_with_the_numbers() -> None:
    model = net(1)
    with pytest.raises(
        ConfigError, match=r"nothing that the risk allows keeps to 292\.97 KiB \(.*needs.* [\d.]+ [KM]iB"
    ) as caught:
        planned(model, sgd(model), batch(0, ROWS), memory=300_000)
    assert 'auto_configs["global_batch"]' in str(caught.value)


def test_a_planning_that_failed_leaves_no_hook_and_no_gradients_behind() -> None:
    model = net(1)
    with pytest.raises(ConfigError, match="nothing that the risk allows"):
        planned(model, sgd(model), batch(0, ROWS), memory=300_000)
    assert hooks_of(model) == 0


# --- the batch of an update -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [48, 7])
def test_the_micro_batches_make_up_the_global_batch(share: int) -> None:
    model = net(1)
    plan = planned(model, sgd(model), batch(0, 16), risk="exact", global_batch=share).plan
    assert plan.micro_batch * plan.merge_steps == share
    strategy = plan.strategy
    assert strategy.gradient_merge == (plan.merge_steps > 1)
    assert not strategy.gradient_merge or strategy.gradient_merge_configs["k_steps"] == plan.merge_steps
    assert any(f"give {plan.micro_batch} rows to each micro-step" in note for note in plan.notes)
    assert {row.samples for row in plan.rows} == {share}


@pytest.mark.parametrize("given", [(torch.randn(16, WIDTH), torch.zeros(8)), (torch.randn(16, WIDTH), torch.tensor(1.0)), ()])
def test_a_sample_without_rows_to_count_is_refused_where_a_global_batch_is_asked_for(given: Any) -> None:
    model = net(1)
    with pytest.raises(ConfigError, match="batch of at least 2 rows"):
        planned(model, sgd(model), given, global_batch=32)


def test_a_sample_without_rows_to_count_is_planned_for_as_it_is() -> None:
    model = net(1)
    x, y = batch(0, 16)

    def loss_fn(model: nn.Module, given: Any) -> Tensor:
        return loss_of(model, (given["x"], given["y"])) * given["weight"]

    given = {"x": x, "y": y, "weight": torch.tensor(2.0)}
    plan = planned(model, sgd(model), given, loss_fn=loss_fn, risk="schedule").plan
    assert plan.micro_batch == 0 and plan.chosen in {row.name for row in plan.rows}


# --- other loops ------------------------------------------------------------------------------------------------------------


def test_the_optimizer_without_momentum_or_state_stays_without(tmp_path: Path) -> None:
    model = net(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = picture(model, optimizer)
    with pictures_before_binding(optimizer) as pictures:
        planned(model, optimizer, batch(0, 16), plan=str(tmp_path / "plan.json"))
    assert changed(before, pictures[0]) == [] and pictures[0]["held"] == 0
    assert load(tmp_path / "plan.json").key["ranks"] == 1


def test_a_model_in_evaluation_is_in_evaluation_afterwards() -> None:
    model = net(1).eval()
    optimizer = sgd(model)
    with pictures_before_binding(optimizer) as pictures:
        planned(model, optimizer, batch(0, 16), risk="exact")
    assert not any(pictures[0]["modes"].values())


def test_modules_that_the_user_has_frozen_are_frozen_in_every_step_that_is_run() -> None:
    model, modes = net(1), set[bool]()

    def loss_fn(model: nn.Module, given: Any) -> Tensor:
        modes.add(model[2].training)  # type: ignore[index]
        return loss_of(model, given)

    assert not model[2].training and model[1].training
    planned(model, sgd(model), batch(0, 16), loss_fn=loss_fn, risk="exact")
    assert modes == {False}


def test_a_loss_is_asked_for_where_the_model_has_none() -> None:
    model = net(1)
    with pytest.raises(ConfigError, match="has no method `loss"):
        fleet.distribute(model, sgd(model), auto(), sample=batch(0, 16))
