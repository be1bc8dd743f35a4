"""Arguments that differ between ranks are refused on all of them, and no rank is left waiting."""

from __future__ import annotations

import torch
from torch import nn

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch).square().mean()
    return out


def with_a_sample_on_one_rank(rank: int) -> str:
    model = net()
    strategy = fleet.DistributedStrategy(recompute=True, recompute_configs={"budget": "1GB"})
    sample = torch.randn(8, 4) if rank else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return raised(lambda: fleet.distribute(model, optimizer, strategy, sample=sample, loss_fn=mean))


def test_a_batch_that_one_rank_did_not_give_is_missed_on_all() -> None:
    told = run_ranks(with_a_sample_on_one_rank, 2)
    assert told[0] == told[1] and "given no batch on ranks [0]" in told[0]


def with_other_budgets(rank: int) -> str:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return raised(lambda: fleet.find_batch(model, optimizer, sample=torch.randn(8, 4), loss_fn=mean, budget=10**6 + rank))


def test_other_budgets_are_refused_on_all() -> None:
    told = run_ranks(with_other_budgets, 2)
    assert told[0] == told[1] and "find_batch was called with different arguments on the ranks" in told[0]


def with_samples_of_other_lengths(rank: int) -> int:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = torch.randn(8 + 4 * rank, 4)
    return fleet.find_batch(model, optimizer, sample=sample, loss_fn=mean, budget=200_000).most


def test_samples_of_other_lengths_come_to_one_answer() -> None:
    one, other = run_ranks(with_samples_of_other_lengths, 2)
    assert one == other > 8
