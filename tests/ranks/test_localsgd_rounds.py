"""Guards settings, weights and moments of a Local SGD round, and that a deleted optimizer frees its model."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_pairs import FINE, Slope, local, pair, same, train
from tests.helpers.localsgd_runs import net, on_nodes, rendezvous


def _refused(rank: int, strategy: dict[str, Any]) -> str:
    return raised(lambda: pair(net(), strategy))


def test_nesterov_without_momentum_is_refused() -> None:
    for told in run_ranks(_refused, 2, local(k_steps=2, outer_nesterov=True)):
        assert told.startswith("ConfigError: ") and "outer_nesterov" in told and "outer_momentum" in told


def _weighted(rank: int) -> list[float]:
    model, optimizer = pair(Slope(), local(k_steps=1, across_nodes_every=2))
    slopes, weights = [[-1, 1, -1, 1], [0, 0, -1, -2], [0, 0, 0, 0]], [[1, 1, 1, 1], [100, 100, 100, 300], [1, 1, 0, 0]]
    seen = []
    for slope, weight in zip(slopes, weights, strict=True):
        optimizer.minimize(model(float(slope[rank])), weight=float(weight[rank]))
        seen.append(model.weight.item() - 1)
    return seen


def test_a_round_among_all_weighs_by_all_that_was_trained_on_since_the_last_of_its_kind(tmp_path: Path) -> None:
    """Inside node 1 (100 * 0.1 + 300 * 0.2) / 400 = 0.175; then the ranks count 101, 101, 100, 300 of 602."""
    nodes = (0, 0, 1, 1)
    for rank, seen in enumerate(run_ranks(on_nodes, 4, nodes, rendezvous(tmp_path), _weighted)):
        assert seen == pytest.approx([0.0, 0.175 * nodes[rank], 0.175 * 400 / 602], abs=1e-12)


def _paired_again(rank: int) -> list[str]:
    told = []
    gc.disable()
    try:
        for strategy in ({}, local(k_steps=2), local(k_steps=2, overlap_steps=1)):
            model, optimizer = pair(net(), strategy)
            train(rank, model, optimizer, 1, 4)
            del optimizer
            told.append(raised(lambda m=model, s=strategy: pair(m, s)))
    finally:
        gc.enable()
    return told


def test_a_deleted_optimizer_frees_its_model_at_once() -> None:
    assert run_ranks(_paired_again, 2) == [[FINE] * 3] * 2


def _nadam(rank: int) -> list[dict[str, Tensor]]:
    model = net()
    strategy = fleet.DistributedStrategy(**local(k_steps=3, average_state=True), on_nan_inf="skip")
    model, optimizer = fleet.distribute(model, torch.optim.NAdam(model.parameters(), lr=0.01), strategy)
    train(rank, model, optimizer, 1, 4, bad=3)
    return [dict(state) for state in optimizer.state.values()]


def test_nadam_keeps_each_ranks_own_product_where_moments_are_averaged() -> None:
    """Rank 1 has made three updates of four: its product has three factors, whatever the count of steps says."""
    factors = [0.9 * (1 - 0.5 * 0.96 ** (step * 4e-3)) for step in range(1, 5)]
    ranks = run_ranks(_nadam, 2)
    for rank, made in ((0, 4), (1, 3)):
        for state in ranks[rank]:
            assert float(state["step"]) == 4.0
            assert float(state["mu_product"]) == pytest.approx(math.prod(factors[:made]), rel=1e-5)
    for first, second in zip(*ranks, strict=True):
        same([first["exp_avg"], first["exp_avg_sq"]], [second["exp_avg"], second["exp_avg_sq"]])
