"""`auto` on two ranks: trials leave nothing behind, all come to one plan, and a rank that fails keeps no other waiting."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.auto.candidate import Candidate
from fleetx.auto.measurements import forecast
from fleetx.auto.plan import Plan, from_json, load, to_json
from tests.helpers.auto_runs import (
    auto,
    batch,
    bound_by_hand,
    changed,
    loss_of,
    net,
    parts_of,
    picture,
    pictures_before_binding,
    planned,
    sgd,
    short_measuring,
    strategies_tried,
    trained_after,
    trained_before,
)
from tests.helpers.harness import raised, run_ranks

SMALL = 16
"""Rows of a sample, where memory is not looked at."""


def seeded(rank: int) -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(rank)


def a_pair(kind: str = "sgd", blocks: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(blocks)
    return model, sgd(model) if kind == "sgd" else torch.optim.Adam(model.parameters(), lr=1e-3)


def told(plan: Plan, tried: list[fleet.DistributedStrategy]) -> dict[str, Any]:
    return {"plan": to_json(plan), "chosen": plan.chosen, "tried": parts_of(tried), "rejected": dict(plan.rejected)}


def agreed(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    assert ranks[0]["plan"] == ranks[1]["plan"] and ranks[0]["tried"] == ranks[1]["tried"]
    return ranks[0]


# --- nothing is left behind -------------------------------------------------------------------------------------------------

ROWS = 192
"""So many that activations outweigh weights: recompute has something to save."""


def _plan_and_train(rank: int, has_momentum: bool, memory: int | None) -> dict[str, Any]:
    seeded(0)
    model, optimizer = a_pair(blocks=2)
    if has_momentum:
        trained_before(model, optimizer)
    seeded(rank)
    before, tried = picture(model, optimizer), list[fleet.DistributedStrategy]()
    slow_from = None if memory is None else 1e-9  # recompute is planned again for each trial: one precision is enough of them
    with short_measuring(few=True, slow_from=slow_from), pictures_before_binding(optimizer) as pictures, strategies_tried(tried):
        ours = planned(model, optimizer, batch(rank, ROWS), risk="schedule", trials=100, memory=memory)
    auto_weights = trained_after(model, ours, rank)

    seeded(0)
    twin, theirs = a_pair(blocks=2)
    if has_momentum:
        trained_before(twin, theirs)
    seeded(rank)
    by_hand = bound_by_hand(twin, theirs, ours.plan.strategy, batch(rank, ROWS))
    same = [torch.equal(a, b) for a, b in zip(auto_weights, trained_after(twin, by_hand, rank), strict=True)]
    rows = [(row.name, row.predicted_bytes, row.measured_bytes) for row in ours.plan.rows]
    return told(ours.plan, tried) | {"changed": changed(before, pictures[0]), "same": same, "rows": rows}


def plain_seconds(plan: Plan) -> tuple[float, float]:
    """Of the plain row, as told and as everything measured makes it: how much backward hides was learnt from its own run."""
    made = forecast(plan.measured, Candidate("float32", plan.measured.passes[0].batch), memory=plan.memory)
    assert not isinstance(made, str)
    return plan.row(made.candidate.name).predicted_s, made.cost.seconds


@pytest.mark.parametrize(("has_momentum", "memory"), [(True, 1_400_000), (False, None)])
def test_trials_of_every_kind_leave_nothing_behind_and_training_is_as_by_hand(has_momentum: bool, memory: int | None) -> None:
    ranks = run_ranks(_plan_and_train, 2, has_momentum, memory)
    found = agreed(ranks)
    for rank in ranks:
        assert rank["changed"] == []
        assert all(rank["same"])
    kinds = {name for names in found["tried"] for name in names.split()}
    assert {"dgc", "powersgd", "localsgd", "gradient_merge", *(["recompute"] if memory else [])} <= kinds
    for name, predicted, measured in found["rows"]:
        assert measured == pytest.approx(predicted, rel=0.05), name
        assert memory is None or measured <= memory, name
    if memory is None:
        as_told, as_measured = plain_seconds(from_json(found["plan"], source=""))
        assert as_told == pytest.approx(as_measured, rel=1e-9)


def _fail(rank: int, how: str) -> dict[str, Any]:
    seeded(0)
    model, optimizer = a_pair()
    trained_before(model, optimizer)
    seeded(rank)
    before = picture(model, optimizer)
    calls = 0

    def loss_fn(model: nn.Module, given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if how == "at once" or (how == "later" and calls == 12 and rank == 1):
            raise ValueError("the labels are no labels")
        return loss_of(model, given)

    configs = {"memory": 200_000} if how == "no memory" else {}
    with short_measuring(few=True):
        error = raised(lambda: planned(model, optimizer, batch(rank, SMALL), loss_fn=loss_fn, risk="exact", **configs))
    return {"error": error, "changed": changed(before, picture(model, optimizer))}


@pytest.mark.parametrize("how", ["at once", "later", "no memory"])
def test_a_planning_that_fails_fails_on_all_ranks_and_leaves_nothing_behind(how: str) -> None:
    ranks = run_ranks(_fail, 2, how)
    for rank in ranks:
        assert rank["changed"] == []
        wanted = "keeps to 195.31 KiB" if how == "no memory" else "the labels are no labels"
        assert wanted in rank["error"]
    if how == "later":
        assert ranks[0]["error"].startswith("FleetError: a rehearsed step failed on rank 1: ValueError")
    if how == "no memory":
        assert "needs at least" in ranks[0]["error"] or "its update alone needs" in ranks[0]["error"]
        assert ranks[0]["error"] == ranks[1]["error"]


# --- one plan for all -------------------------------------------------------------------------------------------------------


def _plan(rank: int, how: str, configs: dict[str, Any]) -> dict[str, Any]:
    """With a rank, or both, that are not as they should be."""
    model, optimizer = a_pair("adam" if how == "adam" else "sgd")
    tried: list[fleet.DistributedStrategy] = []

    def loss_fn(model: nn.Module, given: Any) -> Tensor:
        _fail_or_wait(how, rank, rows=len(given[0]), runs=parts_of(tried[-1:])[0].split())
        return loss_of(model, given)

    rows = [SMALL, 6][rank] if how == "unequal" else SMALL
    slow_from = float("inf") if how in ("no memory under autocast", "no bfloat16") else None
    with short_measuring(few=True, slow_from=slow_from), strategies_tried(tried):
        ours = planned(model, optimizer, batch(rank, rows), loss_fn=loss_fn, **configs)
    table = [(row.name, row.note) for row in ours.plan.rows]
    shape = (ours.plan.micro_batch, ours.plan.merge_steps)
    return told(ours.plan, tried) | {"table": table, "shape": shape, "strategy": ours.plan.strategy.to_dict()}


def _fail_or_wait(how: str, rank: int, *, rows: int, runs: list[str]) -> None:
    if how == "no bfloat16" and "amp" in runs:
        raise RuntimeError("not implemented for 'BFloat16'")
    if rank == 0:
        return
    if how == "slow":
        time.sleep(0.004)
    has_no_memory = {
        "no memory under autocast": "amp" in runs,
        "no memory from 64 rows": rows >= 64,
        "no memory with powersgd": "powersgd" in runs,
    }
    if has_no_memory.get(how):
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")
    if how == "no merging" and "gradient_merge" in runs:
        raise ValueError("this loss may be asked for once an update")
    if how == "no batch of 64" and rows >= 64:
        raise ValueError(f"{rows} rows are too many")


def test_a_slow_rank_is_in_the_plan_of_all() -> None:
    found = agreed(run_ranks(_plan, 2, "slow", {"trials": 2}))
    assert min(row["measured_s"] for row in json.loads(found["plan"])["table"]) > 0.004


def test_ranks_whose_last_batches_differ_come_to_one_plan() -> None:
    agreed(run_ranks(_plan, 2, "unequal", {"trials": 2}))


def test_one_rank_without_memory_under_autocast_leaves_that_out_on_all() -> None:
    found = agreed(run_ranks(_plan, 2, "no memory under autocast", {"trials": 2}))
    assert "bf16" not in found["chosen"] and "7 GiB" in found["rejected"]["amp bf16"]


def test_one_rank_without_memory_for_a_reducer_leaves_that_out_on_all() -> None:
    found = agreed(run_ranks(_plan, 2, "no memory with powersgd", {"trials": 2, "risk": "lossy"}))
    assert "powersgd" not in found["chosen"]
    assert "7 GiB" in found["rejected"]["powersgd"] or any("7 GiB" in note for _, note in found["table"])


def test_one_rank_without_memory_for_a_batch_takes_another_on_all() -> None:
    found = agreed(run_ranks(_plan, 2, "no memory from 64 rows", {"trials": 3, "risk": "exact", "global_batch": 256}))
    rows, merges = found["shape"]
    assert rows * merges * 2 == 256 and rows < 64
    assert all("out of memory" in note for name, note in found["table"] if name in ("fp32", "fp32, 2 x 64"))


def _told_or_planned(rank: int, how: str, configs: dict[str, Any]) -> str:
    return raised(lambda: _plan(rank, how, configs))


def test_a_trial_that_fails_on_one_rank_ends_alike_on_all() -> None:
    """Left out or told: either is an answer, but not one on this rank and the other on that."""
    for how, configs in (
        ("no batch of 64", {"trials": 3, "risk": "exact", "global_batch": 256}),
        ("no merging", {"trials": 20, "risk": "schedule"}),
    ):
        errors = run_ranks(_told_or_planned, 2, how, configs)
        assert errors == ["nothing raised"] * 2 or all("too many" in one or "once an update" in one for one in errors)


def test_an_exception_under_one_precision_is_a_reason_to_leave_it_out() -> None:
    found = agreed(run_ranks(_plan, 2, "no bfloat16", {"trials": 2}))
    assert "not implemented for 'BFloat16'" in found["rejected"]["amp bf16"] and "amp" in found["tried"]
    assert not found["strategy"].get("amp")


def test_dgc_with_adam_is_refused_in_words_and_the_rest_is_planned() -> None:
    found = agreed(run_ranks(_plan, 2, "adam", {"trials": 1, "risk": "lossy"}))
    assert "torch.optim.SGD" in found["rejected"]["dgc"] and "Adam" in found["rejected"]["dgc"]
    assert not found["rejected"]["dgc"].endswith("..")


# --- risk, batch ------------------------------------------------------------------------------------------------------------

RULES = {"lars", "lamb", "muon"}
"""Their updates are timed alone, for a sentence: they are no candidates."""
ALLOWED = {"exact": {"plain"}, "rounding": {"plain", "amp"}, "lossy": {"plain", "amp", "powersgd", "dgc"}}


@pytest.mark.parametrize("risk", ALLOWED)
def test_nothing_riskier_than_allowed_is_ever_run_and_the_rest_is_told(risk: str) -> None:
    found = agreed(run_ranks(_plan, 2, "", {"trials": 50, "risk": risk}))
    assert {name for names in found["tried"] for name in names.split()} - RULES <= ALLOWED[risk]
    assert not any(found["strategy"].get(name) for name in RULES)
    wanted = {"amp bf16", "compile", "recompute", "gradient_merge", "powersgd", "dgc", "localsgd"}
    # No settings of these are tried by the short measuring.
    wanted |= {"bf16_allreduce", "fp16_allreduce", "quantized_allreduce", "adaptive_localsgd"}
    taken = {{"amp": "amp bf16"}.get(name, name) for name in ("amp", "powersgd", "dgc") if found["strategy"].get(name)}
    assert set(found["rejected"]) - RULES == wanted - taken
    for text in found["rejected"].values():
        assert text.endswith(".") and not text.endswith("..")
    assert f'auto_configs["risk"] is "{risk}"' in found["rejected"]["localsgd"]


def test_micro_batches_merging_and_ranks_make_up_the_global_batch() -> None:
    found = agreed(run_ranks(_plan, 2, "", {"trials": 2, "risk": "exact", "global_batch": 24}))
    rows, merges = found["shape"]
    assert rows * merges * 2 == 24
    strategy = found["strategy"]
    assert (strategy["gradient_merge_configs"]["k_steps"] if strategy.get("gradient_merge") else 1) == merges


# --- refusals ---------------------------------------------------------------------------------------------------------------


def _refusals(rank: int) -> dict[str, str]:
    def refused(given: Any, **configs: Any) -> str:
        model, optimizer = a_pair()
        with short_measuring():
            return raised(lambda: planned(model, optimizer, given, **configs))

    def two_calls() -> None:
        model, optimizer = a_pair()
        fleet.distributed_model(model)
        fleet.distributed_optimizer(optimizer, auto())

    def find_batch() -> None:
        model, optimizer = a_pair()
        fleet.find_batch(model, optimizer, auto(), sample=batch(0, SMALL), budget="1GB", loss_fn=loss_of)

    good = batch(rank, SMALL)
    return {
        "none": refused(None),
        "one without": refused(good if rank == 0 else None),
        "odd": refused(good, global_batch=25),
        "rows": refused((good[0], good[1][:8]), global_batch=32),
        "no rows on one": refused(good if rank == 0 else (good[0], good[1][:8]), global_batch=32),
        "two calls": raised(two_calls),
        "find_batch": raised(find_batch),
    }


def test_what_cannot_be_planned_is_refused_on_all_ranks_with_what_to_write() -> None:
    ranks = run_ranks(_refusals, 2)
    assert ranks[0] == ranks[1]
    found = ranks[0]
    assert all(text.startswith("ConfigError: ") for text in found.values())
    for name in ("none", "one without", "two calls", "find_batch"):
        assert "sample=batch" in found[name] and "fleet.distribute(" in found[name]
    assert "no batch on ranks [1]" in found["one without"]
    assert "25, which 2 ranks cannot share equally. Write 24." in found["odd"]
    assert "rows" in found["rows"] and "[0]" in found["rows"] and "[0, 16]" in found["no rows on one"]


def _unlike(rank: int, configs: list[dict[str, Any]]) -> str:
    model, optimizer = a_pair()
    with short_measuring():
        return raised(lambda: planned(model, optimizer, batch(rank, SMALL), **configs[rank]))


def test_ranks_that_ask_for_different_things_are_refused() -> None:
    for unlike in ([{"risk": "exact"}, {"risk": "schedule"}], [{"plan": "one.json"}, {}]):
        errors = run_ranks(_unlike, 2, unlike)
        assert all(error.startswith("ConfigError: ") for error in errors)


# --- the file ---------------------------------------------------------------------------------------------------------------


def _by_file(rank: int, file: str, blocks: int, rows: int, configs: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = a_pair(blocks=blocks)
    calls = 0

    def loss_fn(model: nn.Module, given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return loss_of(model, given)

    found: dict[str, Any] = {}

    def plan() -> None:
        ours = planned(model, optimizer, batch(rank, rows), loss_fn=loss_fn, plan=file, **{"trials": 1, **configs})
        found.update(plan=to_json(ours.plan), strategy=ours.plan.strategy.to_dict(), text=str(ours.plan))

    with short_measuring(few=True):
        error = raised(plan)
    return found | {"calls": calls, "error": error}


def test_a_plan_is_written_reused_edited_and_made_again(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    asked = {"risk": "exact"}
    first = run_ranks(_by_file, 2, file, 1, SMALL, asked)
    assert first[0]["plan"] == first[1]["plan"] == Path(file).read_text() and first[0]["calls"] > 0

    again = run_ranks(_by_file, 2, file, 1, SMALL, asked)
    assert [one["calls"] for one in again] == [0, 0] and again[0]["text"].endswith(f"by the plan in {file}.")
    assert [one["strategy"] for one in again] == [one["strategy"] for one in first]

    plain = json.loads(Path(file).read_text())
    plain["strategy"] = {**plain["strategy"], "bf16_allreduce": True}
    Path(file).write_text(json.dumps(plain))
    edited = run_ranks(_by_file, 2, file, 1, SMALL, asked)
    assert [one["calls"] for one in edited] == [0, 0] and all(one["strategy"]["bf16_allreduce"] for one in edited)

    for blocks, rows, other in ((2, SMALL, asked), (2, 12, asked), (2, 12, {"risk": "exact", "trials": 2})):
        before = Path(file).read_text()
        renewed = run_ranks(_by_file, 2, file, blocks, rows, other)
        assert renewed[0]["calls"] > 0 and renewed[0]["plan"] == Path(file).read_text()
        assert Path(f"{file}.previous").read_text() == before
    assert load(file).key["asked"]["trials"] == 2


@pytest.mark.parametrize("damage", ["", "{", '{"fleetx_plan": 1}', '{"fleetx_plan": 7}'])
def test_a_damaged_file_is_one_clear_error_on_all_ranks(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(damage)
    ranks = run_ranks(_by_file, 2, str(file), 1, SMALL, {})
    assert ranks[0]["error"] == ranks[1]["error"] and str(file) in ranks[0]["error"]
    assert ranks[0]["error"].startswith("ConfigError: ") and ranks[0]["calls"] == 0
    assert file.read_text() == damage


def test_a_file_in_no_folder_is_one_clear_error_on_all_ranks_before_anything_is_run(tmp_path: Path) -> None:
    file = str(tmp_path / "missing" / "plan.json")
    ranks = run_ranks(_by_file, 2, file, 1, SMALL, {"risk": "exact"})
    assert ranks[0]["error"] == ranks[1]["error"] and file in ranks[0]["error"]
    assert ranks[0]["error"].startswith("ConfigError: ")
    assert [one["calls"] for one in ranks] == [0, 0]
