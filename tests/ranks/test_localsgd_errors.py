"""Guards Local SGD after an error that was caught: it is reported once, the next one is clear, and no update is made twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_pairs import FINE, Slope, local, pair, train
from tests.helpers.localsgd_runs import mean_over_ranks, net


def _caught(rank: int, folder: str) -> tuple[list[str], list[str]]:
    """Rounds after 3 and 5: the first hears of update 2; loaded again, the next hears of update 4."""
    model, optimizer = pair(net(), local(k_steps=2))
    train(rank, model, optimizer, 1, 1)
    fleet.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    heard = [raised(lambda: train(rank, model, optimizer, 2, 3, bad=2))]
    after = [raised(optimizer.zero_grad)] + [raised(lambda u=update: train(rank, model, optimizer, u, u)) for update in (4, 5, 6)]
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    heard.append(raised(lambda: train(rank, model, optimizer, 2, 5, bad=4)))
    return heard, after


def test_after_an_error_at_a_round_was_caught_no_call_fails_by_accident_and_the_next_error_is_clear(tmp_path: Path) -> None:
    ranks = run_ranks(_caught, 2, str(tmp_path))
    assert ranks[0] == ranks[1]
    heard, after = ranks[0]
    for told, update in zip(heard, (2, 4), strict=True):
        assert told.startswith("FleetError: ") and f"not made: update {update} of rank 1: losses nan" in told
    assert all(told == FINE or told.startswith("FleetError: ") for told in after)


def _failed_before_save(rank: int, folder: str) -> tuple[str, list[tuple[str, bool]]]:
    """Rounds after 5 and 9; the update that fails is 3."""
    model, optimizer = pair(net(), local(k_steps=4))
    train(rank, model, optimizer, 1, 3, bad=3)
    fleet.save_checkpoint(folder, step=3, model=model, optimizer=optimizer)
    told = raised(lambda: train(rank, model, optimizer, 4, 5))
    resumed = []
    for one, its in ((model, optimizer), pair(net(), local(k_steps=4))):
        fleet.load_checkpoint(folder, model=one, optimizer=its)
        went = raised(lambda m=one, o=its: train(rank, m, o, 4, 9))
        resumed.append((went, torch.equal(one[0].weight, mean_over_ranks(one[0].weight))))
    return told, resumed


def test_a_checkpoint_saved_after_an_update_that_failed_can_be_resumed(tmp_path: Path) -> None:
    """By the pair that heard of it, and by a new one."""
    for told, resumed in run_ranks(_failed_before_save, 2, str(tmp_path)):
        assert told.startswith("FleetError: ") and "update 3 of rank 1" in told
        assert resumed == [(FINE, True)] * 2


def _apart(rank: int, call: str) -> str:
    """Rank 0 makes a call that rank 1 does not make; rank 1 goes on to its next round."""
    model, optimizer = pair(Slope(), local(k_steps=3))
    for _ in range(2):
        optimizer.minimize(model(1.0 + rank))

    def meets() -> None:
        if rank == 0 and call == "average":
            optimizer.average()
        elif rank == 0:
            with optimizer.averaged():
                pass
        for _ in range(2):
            optimizer.minimize(model(1.0 + rank))

    return raised(meets)


@pytest.mark.parametrize(("call", "told"), [("average", "calls average()"), ("averaged", "enters averaged()")])
def test_a_call_that_one_rank_makes_alone_is_refused_on_all_when_they_meet(call: str, told: str) -> None:
    first, second = run_ranks(_apart, 2, call)
    assert first == second
    assert f"rank 0 {told} after its update 2, rank 1 averages by the schedule after its update 4" in first


def _caught_and_gone_on(rank: int) -> list[Any]:
    """A failure is reported once; a script that catches it and goes on has made each update once."""
    model, optimizer = pair(Slope(), local(k_steps=2))
    told = []
    for update in range(1, 6):
        slope = float("nan") if (rank, update) == (1, 2) else 1.0 + rank
        told.append(raised(lambda slope=slope: optimizer.minimize(model(slope))))
    return [told, model.weight.item()]


def test_a_failure_is_told_once_and_no_update_is_made_twice_afterwards() -> None:
    ranks = run_ranks(_caught_and_gone_on, 2)
    for told, _ in ranks:
        assert [text != "nothing raised" for text in told] == [False, False, True, False, False] and "update 2 of rank 1" in told[
            2
        ]
    assert ranks[0][1] == ranks[1][1]


def _failed_in_flight(rank: int) -> list[str]:
    """Rounds are launched after updates 4 and 7, and settled after 6 and 9; rank 1 fails at update 5, in between."""
    model, optimizer = pair(Slope(), local(k_steps=3, overlap_steps=2))
    slopes = [float("nan") if (rank, update) == (1, 5) else 1.0 + rank for update in range(1, 10)]
    return [raised(lambda slope=slope: optimizer.minimize(model(slope))) for slope in slopes]


def test_a_failure_while_a_round_is_under_way_is_told_in_the_next() -> None:
    for told in run_ranks(_failed_in_flight, 2):
        assert told[:8] == [FINE] * 8 and "update 5 of rank 1" in told[8]
