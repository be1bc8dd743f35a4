"""What ranks keep of a compressed change: on another number of ranks, after numbers that are not finite, under other settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_pairs import FINE, local, pair, same, train
from tests.helpers.localsgd_runs import net

INT4 = local(k_steps=2, wire_dtype="int4")
SPARSE = local(k_steps=2, top_k=3, chunk=8, value_bits=2)
LATE = local(k_steps=4, wire_dtype="int4", overlap_steps=2)
"""A round after 5, settled after 7; of three and more ranks the sums are sent after 6."""


def kept(optimizer: Any) -> dict[str, Tensor]:
    shares = optimizer.pipeline.stages.average.state_dict()["shares"]
    return {name: tensor.detach().clone() for name, tensor in shares.items()}


def _saved(rank: int, folder: str, strategy: dict[str, Any], updates: int, together: bool) -> dict[str, Tensor]:
    model, optimizer = pair(net(), strategy)
    train(rank, model, optimizer, 1, updates)
    if together:
        optimizer.average()
    fleet.save_checkpoint(folder, step=updates, model=model, optimizer=optimizer)
    return kept(optimizer)


def _taken_over(rank: int, folder: str, strategy: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    model, optimizer = pair(net(), strategy)
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer, new_world_size=True)
    found = kept(optimizer)
    return found, train(rank, model, optimizer, 5, 7)


@pytest.mark.parametrize("strategy", [INT4, SPARSE], ids=["int4", "sparse"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_another_number_of_ranks_shares_out_what_was_kept(
    before: int, after: int, strategy: dict[str, Any], tmp_path: Any
) -> None:
    saved = run_ranks(_saved, before, str(tmp_path), strategy, 4, True)
    ranks = run_ranks(_taken_over, after, str(tmp_path), strategy)
    for name in saved[0]:
        total = sum(of_rank[name] for of_rank in saved)
        assert total.any()
        for found, _ in ranks:
            torch.testing.assert_close(found[name], total / after, rtol=1e-12, atol=0)
    for _, weights in ranks[1:]:
        same(weights[-1], ranks[0][1][-1])  # update 7 ends a period


def _poisoned(rank: int, strategy: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """After update 2 a weight of rank 1 is not a number: it skips update 3, which ends with a round."""
    model, optimizer = pair(net(), strategy | {"on_nan_inf": "skip", "desync_check_steps": 0})
    train(rank, model, optimizer, 1, 2)
    with torch.no_grad():
        if rank == 1:
            model[0].weight[1, 1] = float("nan")
    train(rank, model, optimizer, 3, 3, bad=3)
    return [param.detach().clone() for param in model.parameters()], kept(optimizer)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", [INT4, SPARSE], ids=["int4", "sparse"])
def test_what_is_not_finite_reaches_all_ranks_and_is_kept_by_none(strategy: dict[str, Any], size: int) -> None:
    ranks = run_ranks(_poisoned, size, strategy)
    for after, found in ranks:
        same(after, ranks[0][0])
        assert not bool(after[0][1, 1].isfinite())
        assert all(bool(tensor.isfinite().all()) for tensor in found.values())


def _other_settings(rank: int, folder: str) -> list[str]:
    told = []
    for strategy in (local(k_steps=2), LATE, local(k_steps=2, wire_dtype="int8"), SPARSE, local(k_steps=2, fragments=2)):
        model, optimizer = pair(net(), strategy)
        told.append(raised(lambda m=model, o=optimizer: fleet.load_checkpoint(folder, model=m, optimizer=o)))
    return told


def test_what_was_kept_is_not_lost_and_bytes_under_way_are_not_read_in_another_way(tmp_path: Any) -> None:
    lost, cut = "it was saved with changes that were kept back", "whose bytes are cut in another way than this run's"
    (tmp_path / "settled").mkdir()
    run_ranks(_saved, 3, str(tmp_path / "settled"), INT4, 4, False)
    for told in run_ranks(_other_settings, 3, str(tmp_path / "settled")):
        assert lost in told[0] and told[1:4] == [FINE] * 3 and lost in told[4]
    (tmp_path / "under way").mkdir()
    run_ranks(_saved, 3, str(tmp_path / "under way"), LATE, 5, False)
    for told in run_ranks(_other_settings, 3, str(tmp_path / "under way")):
        assert lost in told[0] and told[1] == FINE and cut in told[2] and cut in told[3] and lost in told[4]
