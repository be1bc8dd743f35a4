"""Local SGD around any optimizer and any buffer: equal to plain torch on each rank, gathered and averaged by hand beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.optim import Lamb, Lars
from harness import raised, run_ranks
from localsgd_runs import loss_of, mean_over_ranks, net, snapshot, train_by_hand

UPDATES, K, BEGIN = 9, 3, 2
LARS: dict[str, Any] = {"lars_coeff": 0.02, "lars_weight_decay": 0.01}
LAMB: dict[str, Any] = {"lamb_weight_decay": 0.02}
EXACT = 1e-12


def with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def given(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """What a user hands in."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    if name == "lamb":
        return torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-6)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_itself(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The same rule as a plain torch optimizer."""
    if name == "lars":
        return Lars(model.parameters(), lr=0.1, momentum=0.9, model=model, **LARS)
    if name == "lamb":
        return Lamb(model.parameters(), lr=0.02, eps=1e-6, model=model, **LAMB)
    return given(name, model)


def _both(rank: int, name: str, configs: dict[str, Any]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """After each update, the engine's tensors and those made by hand."""
    parts = {"lars": {"lars": True, "lars_configs": LARS}, "lamb": {"lamb": True, "lamb_configs": LAMB}}.get(name, {})
    settings = {"k_steps": K, "begin_step": BEGIN, **configs}
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=settings, **parts)
    model = with_norm()
    model, optimizer = fleet.distribute(model, given(name, model), strategy)
    ours = []
    for update in range(1, UPDATES + 1):
        optimizer.minimize(loss_of(model, rank, update))
        ours.append(snapshot(model, optimizer))
    twin = with_norm()
    theirs = train_by_hand(
        rank,
        twin,
        by_itself(name, twin),
        k=K,
        begin=BEGIN,
        updates=UPDATES,
        overlap=configs.get("overlap_steps", 0),
        average_state=configs.get("average_state", False),
    )
    return list(zip(ours, theirs, strict=True))


CONFIGS: dict[str, dict[str, Any]] = {
    "local state": {},
    "averaged state": {"average_state": True},
    "overlap": {"overlap_steps": 2},
}


@pytest.mark.parametrize("configs", CONFIGS)
@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_any_optimizer_equals_running_it_on_each_rank_and_averaging_by_hand(name: str, configs: str) -> None:
    for rank, history in enumerate(run_ranks(_both, 2, name, CONFIGS[configs])):
        for update, (ours, theirs) in enumerate(history, start=1):
            assert set(ours) == set(theirs)
            for key in ours:
                where = f"{key}, rank {rank}, update {update}"
                torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=EXACT, msg=lambda told, w=where: f"{w}: {told}")


@pytest.mark.parametrize("average_state", [False, True])
def test_after_a_round_buffers_are_equal_to_the_bit_and_the_optimizers_state_only_by_choice(average_state: bool) -> None:
    ranks = run_ranks(_both, 3, "adamw", {"average_state": average_state})
    rounds = [BEGIN + K, BEGIN + 2 * K]
    for update in range(1, UPDATES + 1):
        states = [history[update - 1][0] for history in ranks]
        equal = {key for key in states[0] if all(torch.equal(states[0][key], other[key]) for other in states[1:])}
        moments = {key for key in states[0] if key.endswith(("exp_avg", "exp_avg_sq"))}
        if update <= BEGIN or (update in rounds and average_state):
            assert equal == set(states[0])
        elif update in rounds:
            assert moments.isdisjoint(equal) and {key for key in states[0] if key.startswith("model/")} <= equal
        else:
            assert {"model/1.running_mean", "model/0.weight"}.isdisjoint(equal)


def _skewed(rank: int) -> tuple[float, int, float, int]:
    """Rank r puts 10*(r + 1) into its floating buffer and its integer one before the round."""
    model = net()
    model.register_buffer("level", torch.zeros((), dtype=torch.float32))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 2, "outer_lr": 0.5, "outer_momentum": 0.9})
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    optimizer.minimize(loss_of(model, rank, 1))
    model.level.fill_(10.0 * (rank + 1))
    model.count.fill_(10 * (rank + 1))
    optimizer.minimize(loss_of(model, rank, 2))
    between = float(model.level), int(model.count)
    optimizer.minimize(loss_of(model, rank, 3))
    return (*between, float(model.level), int(model.count))


def test_floating_buffers_become_their_mean_without_an_outer_step_and_integers_rank_0s() -> None:
    assert run_ranks(_skewed, 2) == [(10.0, 10, 15.0, 10), (20.0, 20, 15.0, 10)]


# --- average now, and look at the average -----------------------------------------------------------------------------------


def _looked_at(rank: int, configs: dict[str, Any], updates: int) -> dict[str, Any]:
    model = with_norm()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=configs)
    model, optimizer = fleet.distribute(model, given("sgd", model), strategy)
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


def _looked_at_and_trained_on(rank: int, looks: bool) -> list[dict[str, Tensor]]:
    model = with_norm()
    configs = {"k_steps": 3, "overlap_steps": 1, "outer_lr": 0.7, "outer_momentum": 0.9}
    model, optimizer = fleet.distribute(
        model, given("sgd", model), fleet.DistributedStrategy(localsgd=True, localsgd_configs=configs)
    )
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
    model, optimizer = fleet.distribute(model, given("sgd", model), strategy)
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
    model, optimizer = fleet.distribute(model, given("sgd", model), strategy)
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
    model, optimizer = fleet.distribute(model, given("sgd", model), strategy)
    for update in range(1, 5):
        optimizer.minimize(loss_of(model, rank, update))
    before = snapshot(model, optimizer)
    fleet.save_model(path, model, optimizer)
    after = snapshot(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    return {key.removeprefix("model/"): tensor for key, tensor in before.items() if key.startswith("model/")}


def test_save_model_writes_the_mean_and_leaves_the_ranks_as_they_are(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    first, second = run_ranks(_saved, 2, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(first)
    for key, tensor in saved.items():
        mean = (first[key] + second[key]) / 2 if tensor.is_floating_point() else first[key]
        torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-12)
    assert not torch.equal(first["0.weight"], second["0.weight"])
