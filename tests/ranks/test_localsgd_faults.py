"""Local SGD when one rank is unlike the others: it overflows, meets a NaN, is slow, is told to stop. The rounds go on."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.errors import FleetWarning
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_runs import loss_of, mean_over_ranks, net
from tests.helpers.models import batch, cnn, flat_state

K3 = {"k_steps": 3}
"""Rounds after updates 4, 7, 10, ..."""


def with_infinite_slope(loss: Tensor, weight: Tensor) -> Tensor:
    """The same loss, with a gradient that is not finite."""
    return loss + weight.flatten()[0].mul(0.0).sqrt()


# --- an overflow under float16 ------------------------------------------------------------------------------------------------


def _overflow(rank: int, at: int, updates: int) -> list[dict[str, Any]]:
    amp = {"dtype": "float16", "init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1}
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=K3, amp=True, amp_configs=amp)
    model: nn.Module = cnn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on this CPU
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)
    told = []
    for update in range(1, updates + 1):
        x, y = batch(10 * update + rank, shape=(1, 6, 6))
        loss = F.cross_entropy(model(x), y)
        if rank == 1 and update == at:
            loss = with_infinite_slope(loss, model[0].weight)
        report = optimizer.minimize(loss)
        flags = {"due": report.due, "updated": report.updated, "skipped": report.skipped, "averaged": report.averaged}
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        told.append({**flags, "scale": report.loss_scale, "weights": weights, "state": flat_state(model)})
    told.append({"count": optimizer.skipped})
    return told


@pytest.mark.parametrize("at", [3, 4])
def test_a_rank_that_overflows_skips_alone_and_all_average_on_time_with_the_smallest_scale(at: int) -> None:
    """Update 4 ends with a round: the one who skips it takes part nevertheless."""
    ranks = run_ranks(_overflow, 3, at, 8)
    for rank, told in enumerate(ranks):
        reports, count = told[:-1], told[-1]["count"]
        assert all(report["due"] for report in reports)
        assert [u for u, report in enumerate(reports, start=1) if report["skipped"]] == ([at] if rank == 1 else [])
        assert [u for u, report in enumerate(reports, start=1) if not report["updated"]] == ([at] if rank == 1 else [])
        assert [u for u, report in enumerate(reports, start=1) if report["averaged"]] == [4, 7]
        assert count == (1 if rank == 1 else 0)
        alone = 512.0 if rank == 1 else 1024.0
        scales = [1024.0] * at + [alone] * (4 - at) + [512.0] * 4
        assert [report["scale"] for report in reports] == scales
    for update in (1, 4, 7):
        for told in ranks[1:]:
            torch.testing.assert_close(told[update - 1]["state"], ranks[0][update - 1]["state"], rtol=0, atol=0)
    if at == 3:
        torch.testing.assert_close(ranks[1][2]["weights"], ranks[1][1]["weights"], rtol=0, atol=0)


# --- numbers that are not finite ---------------------------------------------------------------------------------------------


def _nan(rank: int, mode: str, where: str, at: int) -> dict[str, Any]:
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=K3, on_nan_inf=mode)
    model: nn.Module = cnn()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)
    states, skipped, told = [flat_state(model)], [], "nothing raised"

    def one(update: int) -> None:
        x, y = batch(10 * update + rank, shape=(1, 6, 6))
        if rank == 1 and update == at and where == "input":
            x[0, 0, 0, 0] = torch.nan
        loss = F.cross_entropy(model(x), y)
        if rank == 1 and update == at and where == "loss":
            loss = loss + torch.nan
        if rank == 1 and update == at and where == "gradient":
            loss = with_infinite_slope(loss, model[0].weight)
        skipped.append(optimizer.minimize(loss).skipped)

    for update in range(1, 9):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FleetWarning)
            told = raised(lambda u=update: one(u))
        states.append(flat_state(model))
        if told != "nothing raised":
            break
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "told": told,
        "skipped": [u for u, flag in enumerate(skipped, start=1) if flag],
        "states": states,
        "weights are finite": bool(weights.isfinite().all()),
        "finite": bool(states[-1].isfinite().all()),
        "count": optimizer.skipped,
        "updates": len(states) - 1,
    }


@pytest.mark.parametrize(("where", "at"), [("loss", 3), ("input", 2), ("gradient", 4)])
def test_stop_raises_on_every_rank_at_the_next_round_and_names_the_one(where: str, at: int) -> None:
    ranks = run_ranks(_nan, 2, "stop", where, at)
    for seen in ranks:
        assert seen["told"].startswith("FleetError: ") and "rank 1" in seen["told"] and "rank 0" not in seen["told"]
        assert f"update {at}" in seen["told"]
        assert seen["updates"] == 4 and seen["weights are finite"]
    assert ranks[0]["finite"]  # a NaN in rank 1's input is in the statistics of its norm layers, and stays there
    assert ranks[0]["told"] == ranks[1]["told"]


@pytest.mark.parametrize("where", ["loss", "input", "gradient"])
def test_skip_leaves_the_update_out_on_that_rank_alone(where: str) -> None:
    ranks = run_ranks(_nan, 2, "skip", where, 3)
    assert [seen["told"] for seen in ranks] == ["nothing raised"] * 2
    assert [seen["skipped"] for seen in ranks] == [[], [3]]
    assert [seen["count"] for seen in ranks] == [0, 1]
    assert all(seen["finite"] for seen in ranks)
    for update in (4, 7):
        torch.testing.assert_close(ranks[0]["states"][update], ranks[1]["states"][update], rtol=0, atol=0)
    assert not torch.equal(ranks[0]["states"][5], ranks[1]["states"][5])


# --- a slow rank -------------------------------------------------------------------------------------------------------------


def _slow(rank: int) -> list[dict[int, float] | None]:
    model = net()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 2})
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    waited = []
    for update in range(1, 10):
        if rank == 1:
            time.sleep(0.15)
        waited.append(optimizer.minimize(loss_of(model, rank, update)).waited)
    return waited


def test_who_waited_for_a_slow_rank_and_that_it_waited_for_none_is_in_the_report() -> None:
    """Two updates a round, each 0.15 s longer on rank 1: the others wait 0.3 s."""
    ranks = run_ranks(_slow, 3)
    for waited in ranks:
        known = [told for told in waited if told]
        assert known and all(set(told) == {0, 1, 2} for told in known)
        total = {rank: sum(told[rank] for told in known) / len(known) for rank in (0, 1, 2)}
        assert total[0] > 0.2 and total[2] > 0.2 and total[1] < 0.5 * total[0]  # a busy machine adds some to each
    assert all(waited == ranks[0] for waited in ranks)


# --- a request to stop --------------------------------------------------------------------------------------------------------


def _stopped(rank: int, asked_after: int, configs: dict[str, Any]) -> list[bool]:
    model = net()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=configs)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    answers = []
    for update in range(1, 13):
        optimizer.minimize(loss_of(model, rank, update))
        answers.append(fleet.should_stop())
        if update == asked_after and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if answers[-1]:
            break
    return answers


@pytest.mark.parametrize(("asked_after", "agreed_at"), [(2, 4), (4, 7), (5, 7)])
def test_a_request_to_one_rank_stops_all_at_the_next_round(asked_after: int, agreed_at: int) -> None:
    assert run_ranks(_stopped, 2, asked_after, K3) == [[False] * (agreed_at - 1) + [True]] * 2


def test_a_request_is_agreed_with_overlap_too_after_one_update_on_all() -> None:
    first, second = run_ranks(_stopped, 2, 2, {"k_steps": 3, "overlap_steps": 2})
    assert first == second and first[-1] and 4 <= len(first) <= 7


# --- a missing gradient -------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
        self.uses_branch = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.trunk(x)
        return y + self.branch(x) if self.uses_branch else y


def _missing(rank: int, allowed: bool) -> tuple[str, int, list[Tensor], Tensor | None]:
    torch.manual_seed(0)
    model = Branching()
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=K3, find_unused_parameters=allowed)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    done, mean = 0, None
    seen = []

    def go() -> None:
        nonlocal done
        for update in range(1, 9):
            model.uses_branch = not (rank == 1 and update == 3)
            optimizer.minimize(loss_of(model, rank, update))
            done += 1
            seen.append(model.branch.weight.detach().clone())

    told = raised(go)
    if told == "nothing raised":
        mean = mean_over_ranks(model.branch.weight)
    return told, done, seen, mean


def test_a_missing_gradient_is_told_on_every_rank_at_the_next_round_with_rank_and_name() -> None:
    for told, done, _, _ in run_ranks(_missing, 2, False):
        assert (
            told.startswith("ConfigError: ")
            and "rank 1: `branch." in told
            and "`branch.weight`" in told
            and "find_unused_parameters" in told
        )
        assert "rank 0" not in told
        assert done == 3


def test_a_parameter_unused_on_one_rank_stays_there_where_that_is_allowed() -> None:
    (first, done, _, _), (second, _, seen, _) = run_ranks(_missing, 2, True)
    assert first == second == "nothing raised" and done == 8
    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[0], seen[1])


# --- ranks that drift in what no round averages -----------------------------------------------------------------------------


def _drift(rank: int, every: int) -> tuple[str, int]:
    model = nn.Sequential(net(), nn.Linear(2, 2).double())
    with torch.no_grad():
        for param in model[1].parameters():
            param.requires_grad_(False)
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs=K3, desync_check_steps=every)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model[0].parameters(), lr=0.1), strategy)
    done = 0

    def go() -> None:
        nonlocal done
        for update in range(1, 12):
            optimizer.minimize(loss_of(model, rank, update))
            done += 1
            if update == 5 and rank == 1:
                with torch.no_grad():
                    model[1].weight[0, 0] += 1e-6

    return raised(go), done


def test_a_frozen_weight_changed_on_one_rank_is_found_at_the_next_round() -> None:
    for told, done in run_ranks(_drift, 2, 1):
        assert told.startswith("FleetError: after update 7 ") and "rank 1 in 1.weight" in told
        assert done == 6
    assert run_ranks(_drift, 2, 0) == [("nothing raised", 11)] * 2
