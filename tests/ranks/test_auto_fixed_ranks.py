"""`auto` on two ranks beside parts that the user has set: kept in all that is run, in the plan, in its file and in training."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.auto.plan import Plan, from_json, to_json
from fleetx.engine.setup.conflicts import check_parts
from fleetx.strategies import catalogue
from tests.helpers.auto_runs import (
    batch,
    bound_by_hand,
    changed,
    net,
    picture,
    pictures_before_binding,
    sgd,
    short_measuring,
    strategies_tried,
    trained_after,
)
from tests.helpers.harness import raised, run_ranks

ROWS = 48
SETTINGS: dict[str, dict[str, Any]] = {
    "clip_norm": {"clip_norm": True, "clip_norm_configs": {"max_norm": 0.5}},
    "gradient_merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3, "avg": False}},
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["0", "1"]}},
    "recompute by a budget": {"recompute": True, "recompute_configs": {"budget": 1_200_000}},
    "lamb": {"lamb": True, "lamb_configs": {"lamb_weight_decay": 0.02}},
    "lars": {"lars": True, "clip_norm": True},
    "muon": {"muon": True, "muon_configs": {"muon_weight_decay": 0.02}},
    "bf16_allreduce": {"bf16_allreduce": True},
    "powersgd": {"powersgd": True, "powersgd_configs": {"rank": 2}},
    "dgc": {"dgc": True, "dgc_configs": {"sparsity": [0.75, 0.99], "rampup_step": 4, "rampup_begin_step": 2}},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 4, "overlap_steps": 3, "begin_step": 2}, "clip_norm": True},
    "adaptive_localsgd": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4}},
    "amp": {"amp": True, "amp_configs": {"dtype": "bfloat16", "custom_black_list": ["BatchNorm1d"]}},
    "amp in float16": {"amp": True, "amp_configs": {"dtype": "float16"}},
    "sync_batch_norm": {"sync_batch_norm": True},
}
REFUSED = {
    "clip_norm": {"dgc": "clip_norm, which you set, claims `clip`."},
    "lamb": {"dgc": "lamb, which you set, claims `momentum`."},
    "bf16_allreduce": {name: "bf16_allreduce, which you set, claims `reduce`." for name in ("powersgd", "dgc", "localsgd")},
}


def seeded(rank: int) -> None:
    """All that the net draws from."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(rank)


def a_pair(given: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(2)
    if "muon" in given:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3) if "lamb" in given else sgd(model)


def strategy_of(given: dict[str, Any], **configs: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(auto=True, auto_configs=configs, **given)


def _plan_and_train(rank: int, name: str, configs: dict[str, Any]) -> dict[str, Any]:
    given, (model, optimizer) = SETTINGS[name], a_pair(SETTINGS[name])
    seeded(rank)
    before, tried = picture(model, optimizer), list[fleet.DistributedStrategy]()
    said = io.StringIO()
    with (
        short_measuring(few=True),
        pictures_before_binding(optimizer) as pictures,
        strategies_tried(tried),
        contextlib.redirect_stdout(said),
    ):
        ours = bound_by_hand(model, optimizer, strategy_of(given, **configs), batch(rank, ROWS))
    weights = trained_after(model, ours, rank)

    twin, theirs = a_pair(given)
    seeded(rank)
    by_hand = bound_by_hand(twin, theirs, ours.plan.strategy, batch(rank, ROWS))
    same = [torch.equal(a, b) for a, b in zip(weights, trained_after(twin, by_hand, rank), strict=True)]
    return {
        "plan": to_json(ours.plan),
        "changed": changed(before, pictures[0]),
        "same": all(same),
        "tried": [strategy.to_dict() for strategy in tried],
        "said": said.getvalue(),
    }


def planned_around(name: str, **configs: Any) -> tuple[Plan, dict[str, Any]]:
    ranks = run_ranks(_plan_and_train, 2, name, configs)
    assert ranks[0]["plan"] == ranks[1]["plan"] and ranks[0]["tried"] == ranks[1]["tried"]
    assert [rank["changed"] for rank in ranks] == [[], []] and all(rank["same"] for rank in ranks)
    assert ranks[1]["said"] == ""
    return from_json(ranks[0]["plan"], source=""), ranks[0]


LONG = ("recompute", "lars", "muon", "bf16_allreduce", "adaptive_localsgd", "amp in float16")
"""Campaigns: others like them are quick tests."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.campaign] if name in LONG else []) for name in SETTINGS])
def test_a_part_is_kept_as_it_is_and_the_rest_is_planned_around_it(name: str) -> None:
    plan, found = planned_around(name, risk="schedule", trials=3)
    given = SETTINGS[name]
    wanted = fleet.DistributedStrategy(**given)
    for part in wanted.parts():
        assert part in plan.strategy.parts()
    check_parts(plan.strategy.parts())
    for switch in [key for key in given if key in catalogue() and key != "recompute"]:  # passes are measured without it
        assert all(strategy.get(switch) for strategy in found["tried"])
    if "recompute" in given:
        assert any(
            strategy.get("recompute_configs") == plan.strategy.to_dict()["recompute_configs"] for strategy in found["tried"]
        )
    assert plan.row(plan.chosen).measured_s is not None
    for other, why in REFUSED.get(name, {}).items():
        assert plan.rejected[other] == why and f"\n  {other}: {why}" in found["said"]
        assert not any(strategy.get(other) for strategy in found["tried"])
    assert "\n  kept: " in found["said"] and all(part.name in found["said"] for part in wanted.parts())


def test_merging_and_micro_batches_make_up_the_global_batch_with_the_merging_that_was_set() -> None:
    plan, _ = planned_around("gradient_merge", risk="exact", trials=1, global_batch=96)
    assert (plan.micro_batch, plan.merge_steps) == (16, 3)
    assert plan.strategy.gradient_merge_configs == {"k_steps": 3, "avg": False}


def test_units_that_were_named_are_computed_again_in_every_plan_that_is_run() -> None:
    plan, _ = planned_around("recompute", risk="exact", trials=5)
    assert [row.name for row in plan.rows] == ["fp32, recompute"]
    for row in plan.rows:
        assert row.measured_bytes == pytest.approx(row.predicted_bytes, rel=0.05)


def test_risk_does_not_bind_what_was_set() -> None:
    for name in ("powersgd", "localsgd"):
        plan, found = planned_around(name, risk="exact", trials=5)
        assert [row.risk for row in plan.rows] == ["exact"] and not any(one.get("amp") for one in found["tried"])


# --- the file ---------------------------------------------------------------------------------------------------------------


def _by_file(rank: int, file: str, name: str) -> dict[str, Any]:
    given, (model, optimizer) = SETTINGS[name], a_pair(SETTINGS[name])
    tried: list[fleet.DistributedStrategy] = []
    with short_measuring(few=True), strategies_tried(tried), contextlib.redirect_stdout(io.StringIO()) as said:
        asked = strategy_of(given, risk="exact", trials=1, plan=file)
        ours = bound_by_hand(model, optimizer, asked, batch(rank, ROWS))
    return {"runs": len(tried), "said": said.getvalue(), "strategy": ours.plan.strategy.to_dict()}


def test_a_plan_in_a_file_is_used_again_beside_the_same_parts_alone(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    first, again = (run_ranks(_by_file, 2, file, "clip_norm") for _ in range(2))
    assert first[0]["runs"] > 0 and again[0]["runs"] == 0 and again[0]["strategy"] == first[0]["strategy"]
    assert f"by the plan in {file}. Kept: clip_norm (max_norm=0.5)." in again[0]["said"]
    other = run_ranks(_by_file, 2, file, "bf16_allreduce")
    assert other[0]["runs"] > 0 and "a new one is made: fixed is {'bf16_allreduce': True}" in other[0]["said"]
    assert other[0]["strategy"]["bf16_allreduce"] and "clip_norm" not in other[0]["strategy"]


# --- refusals ---------------------------------------------------------------------------------------------------------------


def _refusals(rank: int) -> dict[str, str]:
    def refused(given: dict[str, Any], *, has_sample: bool = True, **configs: Any) -> str:
        model, optimizer = a_pair(given)
        sample = batch(rank, ROWS) if has_sample else None
        with short_measuring(few=True):
            return raised(lambda: bound_by_hand(model, optimizer, strategy_of(given, **configs), sample))

    return {
        "conflict": refused({"dgc": True, "clip_norm": True}),
        "batch": refused(SETTINGS["gradient_merge"], global_batch=100),
        "budget": refused(SETTINGS["recompute by a budget"], memory=1_000_000),
        "names": refused({"recompute": True, "recompute_configs": {"checkpoints": ["none"]}}),
        "optimizer": refused({"lamb": True, "sync_batch_norm": True} | {"lars": True}),
        "localsgd": refused(SETTINGS["localsgd"], has_sample=False),
    }


def test_what_cannot_be_planned_around_is_refused_on_all_ranks_with_the_reason() -> None:
    ranks = run_ranks(_refusals, 2)
    assert ranks[0] == ranks[1]
    found = ranks[0]
    assert found["conflict"].startswith("StrategyConflict: clip_norm and dgc both claim `clip`.")
    assert "the 50 rows of each rank cannot be made up of 3 equal micro-batches" in found["batch"]
    assert found["batch"].endswith("Write 96.")
    assert "is 1200000, and auto_configs" in found["budget"] and found["budget"].endswith("at most 1000000.")
    assert "names `none`; the model has no such module" in found["names"]
    assert found["optimizer"].startswith("StrategyConflict: lamb and lars both claim")
    assert "given no batch" in found["localsgd"] and "strategy.adaptive_localsgd = True without auto" in found["localsgd"]
