"""Guards merge windows of Local SGD that are thrown away, half filled or full of NaN: ranks meet on time and resume exactly."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_pairs import FINE, NAN, Slope, local, pair, same, train
from tests.helpers.localsgd_runs import mean_over_ranks, net, snapshot, with_norm


def _thrown_away(rank: int) -> tuple[list[float], list[bool]]:
    model, optimizer = pair(Slope(), local(k_steps=2))
    seen, averaged = [], []
    for update in range(1, 6):
        optimizer.backward(model(3.0 if rank else 1.0))
        if rank == 1 and update == 3:
            optimizer.zero_grad()
            averaged.append(True)  # that call has no report; the weight tells
        else:
            averaged.append(optimizer.step().averaged)
            optimizer.zero_grad()
        seen.append(model.weight.item())
    return seen, averaged


def test_a_rank_that_throws_its_update_away_meets_the_others_on_time() -> None:
    """Slopes 1 and 3, lr 0.1, from 1: dense to 0.8; alone 0.7 | 0.5; then 0.6 | thrown away, mean 0.55; then 0.35 | -0.05."""
    (first, one), (second, two) = run_ranks(_thrown_away, 2)
    assert one == two == [False, False, True, False, True]
    assert first == pytest.approx([0.8, 0.7, 0.55, 0.45, 0.15], abs=1e-12)
    assert second == pytest.approx([0.8, 0.5, 0.55, 0.25, 0.15], abs=1e-12)


def _half_filled(rank: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two micro-batches an update; the seventh, first of its window, is NaN where it enters rank 1's BatchNorm."""
    merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}, "on_nan_inf": "skip"}

    def run(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        for micro in range(first, last + 1):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * micro + rank)).double()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FleetWarning)
                optimizer.minimize(model(x * NAN if rank == 1 and micro == 7 else x).square().mean())

    straight, optimizer = pair(with_norm(), local(k_steps=3) | merged)
    run(straight, optimizer, 1, 20)
    undisturbed = snapshot(straight, optimizer)
    model, optimizer = pair(with_norm(), local(k_steps=3) | merged)
    run(model, optimizer, 1, 7)
    fleet.save_checkpoint(folder, step=7, model=model, optimizer=optimizer)
    model, optimizer = pair(with_norm(), local(k_steps=3) | merged)
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    run(model, optimizer, 8, 20)
    return undisturbed, snapshot(model, optimizer)


def test_a_window_half_filled_with_nan_is_saved_and_resumed_to_the_bit_with_finite_statistics(tmp_path: Path) -> None:
    for undisturbed, resumed in run_ranks(_half_filled, 2, str(tmp_path)):
        same(resumed, undisturbed)
        assert all(bool(tensor.isfinite().all()) for tensor in resumed.values())


def _average_in_window(rank: int) -> tuple[str, str, bool]:
    merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    model, optimizer = pair(net(), local(k_steps=50) | merged)
    train(rank, model, optimizer, 1, 5)
    inside = raised(optimizer.average)
    optimizer.flush()
    after = raised(optimizer.average)
    return inside, after, torch.equal(model[0].weight, mean_over_ranks(model[0].weight))


def test_average_inside_a_merge_window_asks_for_a_flush_first() -> None:
    for inside, after, equal in run_ranks(_average_in_window, 2):
        assert inside.startswith("FleetError: ") and "flush" in inside
        assert after == FINE and equal
