"""average(), averaged() and save_model under Local SGD: all ranks come together, or look at where they would meet."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_runs import loss_of, mean_over_ranks, snapshot, with_norm


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _looked_at(rank: int, configs: dict[str, Any], updates: int) -> dict[str, Any]:
    model = with_norm()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=configs)
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for update in range(1, updates + 1):
        optimizer.minimize(loss_of(model, rank, update))
    coming = loss_of(model, rank, 99)
    before = snapshot(model, optimizer)
    mean = {k: mean_over_ranks(v) for k, v in before.items() if k.startswith("model/") and v.is_floating_point()}
    with optimizer.averaged():
        inside = snapshot(model, optimizer)
        told = raised(lambda: optimizer.minimize(coming))
    return {"before": before, "mean": mean, "inside": inside, "after": snapshot(model, optimizer), "told": told}


@pytest.mark.parametrize("configs", [{"k_steps": 5}, {"k_steps": 3, "overlap_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.9}])
def test_averaged_gives_the_mean_inside_and_each_ranks_own_bits_afterwards(configs: dict[str, Any]) -> None:
    """Update 5 with k=3 and an overlap of 2 is in the midst of a round."""
    for seen in run_ranks(_looked_at, 2, configs, 5):
        for key, mean in seen["mean"].items():
            torch.testing.assert_close(seen["inside"][key], mean, rtol=0, atol=1e-12)
        assert not torch.equal(seen["before"]["model/0.weight"], seen["mean"]["model/0.weight"])
        for key, tensor in seen["before"].items():
            torch.testing.assert_close(seen["after"][key], tensor, rtol=0, atol=0)
        assert seen["told"].split(":")[0] in ("FleetError", "ConfigError") and "averaged()" in seen["told"]


def _meddled_inside(rank: int, folder: str) -> dict[str, Any]:
    """Between optimizer.backward and optimizer.step the script enters averaged()."""
    model = with_norm()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 5})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for update in (1, 2):
        optimizer.minimize(loss_of(model, rank, update))
    optimizer.backward(loss_of(model, rank, 3))
    before = snapshot(model, optimizer)
    with optimizer.averaged():
        step = raised(optimizer.step)
        save = raised(lambda: fleet.save_checkpoint(folder, step=2, model=model, optimizer=optimizer))
    after = snapshot(model, optimizer)
    return {"step": step, "save": save, "equal": all(torch.equal(before[key], after[key]) for key in before)}


def test_inside_averaged_neither_a_step_nor_a_checkpoint_is_made(tmp_path: Path) -> None:
    for seen in run_ranks(_meddled_inside, 2, str(tmp_path)):
        assert "averaged()" in seen["step"] and "averaged()" in seen["save"] and seen["equal"]


def _left_by_an_error(rank: int) -> bool:
    model = with_norm()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 5})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for update in (1, 2, 3):
        optimizer.minimize(loss_of(model, rank, update))
    before = snapshot(model, optimizer)
    with contextlib.suppress(ValueError), optimizer.averaged():
        raise ValueError
    after = snapshot(model, optimizer)
    return all(torch.equal(before[key], after[key]) for key in before)


def test_leaving_averaged_by_an_error_gives_the_own_bits_back_too() -> None:
    assert run_ranks(_left_by_an_error, 2) == [True, True]


def _looked_at_and_trained_on(rank: int, looks: bool) -> list[dict[str, Tensor]]:
    model = with_norm()
    configs = {"k_steps": 3, "overlap_steps": 1, "outer_lr": 0.7, "outer_momentum": 0.9}
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(localsgd=True, localsgd_configs=configs))
    history = []
    for update in range(1, 10):
        optimizer.minimize(loss_of(model, rank, update))
        if looks:
            with optimizer.averaged():
                model.eval()
                loss_of(model, 0, 50)
                model.train()
        history.append(snapshot(model, optimizer))
    return history


def test_looking_at_the_average_after_every_update_changes_no_bit_of_the_training() -> None:
    for undisturbed, looked in zip(
        run_ranks(_looked_at_and_trained_on, 2, False), run_ranks(_looked_at_and_trained_on, 2, True), strict=True
    ):
        for ours, theirs in zip(looked, undisturbed, strict=True):
            assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def _in_the_dense_phase(rank: int) -> bool:
    model = with_norm()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 2, "begin_step": 5})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    optimizer.minimize(loss_of(model, rank, 1))
    before = snapshot(model, optimizer)
    with optimizer.averaged():
        inside = snapshot(model, optimizer)
    optimizer.average()
    after = snapshot(model, optimizer)
    return all(torch.equal(before[key], inside[key]) and torch.equal(before[key], after[key]) for key in before)


def test_in_the_dense_phase_there_is_nothing_to_average() -> None:
    assert run_ranks(_in_the_dense_phase, 2) == [True, True]


def _averaged_now(rank: int, overlap: int) -> tuple[list[dict[str, Tensor]], list[bool], Tensor]:
    """k=4 from update 1: rounds after 5 and 9; average() after update 6, with the round of 5 still under way if overlapped."""
    model = with_norm()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4, "overlap_steps": overlap})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    history, averaged = [], []
    mean = torch.zeros(())
    for update in range(1, 11):
        averaged.append(optimizer.minimize(loss_of(model, rank, update)).averaged)
        if update == 6:
            mean = mean_over_ranks(model[0].weight)
            optimizer.average()
        history.append(snapshot(model, optimizer))
    return history, averaged, mean


@pytest.mark.parametrize("overlap", [0, 3])
def test_average_brings_all_ranks_together_now_and_leaves_the_schedule(overlap: int) -> None:
    (first, averaged, mean), (second, others, _) = run_ranks(_averaged_now, 2, overlap)
    assert averaged == others
    assert {u for u, flag in enumerate(averaged, start=1) if flag} == ({5, 9} if overlap == 0 else set())
    for key in first[5]:
        if key.startswith("model/"):
            assert torch.equal(first[5][key], second[5][key])
    # A round in flight is finished first; it moves both ranks to the same place, so the mean of all is what it was.
    torch.testing.assert_close(first[5]["model/0.weight"], mean, rtol=0, atol=1e-12)
    assert not torch.equal(first[6]["model/0.weight"], second[6]["model/0.weight"])
    assert torch.equal(first[8]["model/0.weight"], second[8]["model/0.weight"]) == (overlap == 0)


def _saved(rank: int, path: str) -> dict[str, Tensor]:
    model = with_norm()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 5})
    model, optimizer = fleet.distribute(model, sgd(model), strategy)
    for update in range(1, 5):
        optimizer.minimize(loss_of(model, rank, update))
    before = snapshot(model, optimizer)
    fleet.save_model(path, model, optimizer)
    after = snapshot(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    return {key.removeprefix("model/"): tensor for key, tensor in before.items() if key.startswith("model/")}


def test_save_model_writes_the_mean_and_leaves_the_ranks_as_they_are(tmp_path: Path) -> None:
    first, second = run_ranks(_saved, 2, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(first)
    for key, tensor in saved.items():
        mean = (first[key] + second[key]) / 2 if tensor.is_floating_point() else first[key]
        torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-12)
    assert not torch.equal(first["0.weight"], second["0.weight"])
