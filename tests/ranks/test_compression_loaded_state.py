"""Guards what compressors keep between updates when a state or a checkpoint of other weights, strategies or ranks is loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.compressed_pairs import DGC, POWERSGD, SPARSE, pair, step, weights
from tests.helpers.harness import raised, run_ranks


def test_settings_changed_after_a_state_was_loaded_by_hand_are_obeyed(alone: None) -> None:
    """Loading makes new group dicts. Without momentum and decay, v is the gradient: entry by entry what was not sent."""
    model, optimizer = pair(DGC)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    step(model, optimizer, 0)
    state = optimizer.pipeline.stages.reduce.state_dict()["shares"]
    step(model, optimizer, 1)
    for name, u in optimizer.pipeline.stages.reduce.state_dict()["shares"]["momentum"].items():
        assert not torch.equal(u, state["unsent"][name]) and float(u.abs().max()) < 1.0
    rules = optimizer.pipeline.stages.reduce._rules()
    assert {rule.momentum for rule in rules.values()} == {0.0}


def test_what_was_kept_goes_with_the_weights_it_was_of_when_a_state_is_loaded_by_hand(alone: None) -> None:
    model, optimizer = pair(DGC)
    assert optimizer.state_dict()["state"] == {}
    step(model, optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not any(optimizer.pipeline.stages.reduce.state_dict()["shares"].values())


def _resumed(rank: int, folder: str, saves: dict[str, Any], loads: dict[str, Any]) -> tuple[str, bool]:
    model, optimizer = pair(saves)
    for update in range(4):
        step(model, optimizer, update, rank)
    fleet.save_checkpoint(folder, step=4, model=model, optimizer=optimizer)
    model, optimizer = pair(loads)
    for update in range(2):
        step(model, optimizer, update, rank)
    before = weights(model).clone()
    with warnings.catch_warnings():  # worker 0 warns that the strategy is another (test_strategy_in_checkpoint.py)
        warnings.simplefilter("ignore", FleetWarning)
        told = raised(lambda: fleet.load_checkpoint(folder, model=model, optimizer=optimizer))
    if told == "nothing raised":
        step(model, optimizer, 4, rank)
    return told, torch.equal(weights(model), before)


DENSE = {"dgc": True, "dgc_configs": {**SPARSE, "rampup_begin_step": 9}}


@pytest.mark.parametrize(
    ("saves", "loads", "told"),
    [
        (DGC, DENSE, "compressed already, and this run's next update is dense"),
        (DGC, {}, "saved under strategy.dgc, with gradients that were kept back, and this run has a strategy that keeps nothing"),
        (DGC, POWERSGD, "and this run has strategy.powersgd"),
        ({}, DGC, "nothing raised"),
        ({}, POWERSGD, "nothing raised"),
        (DENSE, DGC, "nothing raised"),
        (DENSE, {}, "nothing raised"),
    ],
)
def test_a_checkpoint_goes_into_another_strategy_where_nothing_is_lost_by_it(
    saves: dict[str, Any], loads: dict[str, Any], told: str, tmp_path: Path
) -> None:
    for found, untouched in run_ranks(_resumed, 2, str(tmp_path), saves, loads):
        assert told in found and untouched == (told != "nothing raised")


def _forgotten(rank: int, folder: str) -> bool:
    model, optimizer = pair({})
    step(model, optimizer, 0, rank)
    fleet.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    model, optimizer = pair(POWERSGD)
    for update in range(3):
        step(model, optimizer, update, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)
        fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    return any(optimizer.pipeline.stages.reduce.state_dict()["shares"].values())


def test_what_was_kept_for_other_weights_goes_when_a_plain_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(_forgotten, 2, str(tmp_path)) == [False, False]


def _damaged(rank: int, folder: str, saves: bool) -> str:
    model, optimizer = pair({})
    step(model, optimizer, 0, rank)
    if saves:
        torch.rand(rank + 1)  # random states differ, and each rank has a file
        fleet.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
        return ""
    return raised(lambda: fleet.load_checkpoint(folder, model=model, optimizer=optimizer, new_world_size=True))


def test_another_number_of_ranks_needs_no_tensors_of_ranks_that_are_not_there(tmp_path: Path) -> None:
    run_ranks(_damaged, 2, str(tmp_path), True)
    (file,) = tmp_path.glob("step-*/rank-00001.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert run_ranks(_damaged, 1, str(tmp_path), False) == ["nothing raised"]
