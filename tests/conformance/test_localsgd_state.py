"""Local SGD around any optimizer and any buffer: equal to plain torch on each rank, gathered and averaged by hand beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.optim import Lamb, Lars
from tests.helpers.harness import run_ranks
from tests.helpers.localsgd_runs import loss_of, net, on_nodes, rendezvous, snapshot, train_by_hand, with_norm

UPDATES, K, BEGIN = 9, 3, 2
LARS: dict[str, Any] = {"lars_coeff": 0.02, "lars_weight_decay": 0.01}
LAMB: dict[str, Any] = {"lamb_weight_decay": 0.02}
EXACT = 1e-12


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


def _skewed(rank: int, across: int, updates: int) -> list[tuple[float, int]]:
    """Rank r puts 10*(r + 1) into its floating buffer and its integer one after update 1; rounds after 3 and 5."""
    model = net()
    model.register_buffer("level", torch.zeros((), dtype=torch.float32))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    configs = {"k_steps": 2, "outer_lr": 0.5, "outer_momentum": 0.9, "across_nodes_every": across}
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=configs)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    seen = []
    for update in range(1, updates + 1):
        optimizer.minimize(loss_of(model, rank, update))
        seen.append((float(model.level), int(model.count)))
        if update == 1:
            model.level.fill_(10.0 * (rank + 1))
            model.count.fill_(10 * (rank + 1))
    return seen


def test_floating_buffers_become_their_mean_without_an_outer_step_and_integers_rank_0s() -> None:
    assert run_ranks(_skewed, 2, 1, 3) == [[(0.0, 0), (10.0, 10), (15.0, 10)], [(0.0, 0), (20.0, 20), (15.0, 10)]]


def test_inside_a_node_floating_buffers_become_the_nodes_mean(tmp_path: Path) -> None:
    ranks = run_ranks(on_nodes, 4, (0, 0, 1, 1), rendezvous(tmp_path), _skewed, 2, 5)
    assert [[level for level, _ in seen] for seen in ranks] == [
        [0.0, 10.0, 15.0, 15.0, 25.0],
        [0.0, 20.0, 15.0, 15.0, 25.0],
        [0.0, 30.0, 35.0, 35.0, 25.0],
        [0.0, 40.0, 35.0, 35.0, 25.0],
    ]
    assert {seen[-1][1] for seen in ranks} == {10}
