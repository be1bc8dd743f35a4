"""DataLoader(shuffle=True) on several ranks, as in a script for one GPU: rank 0 says what to write, and of nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, WeightedRandomSampler

from fleetx import fleet
from tests.helpers.harness import run_ranks

DATA = TensorDataset(torch.arange(48.0)[:, None])


def batches_of(rank: int, case: str) -> Iterable[list[Tensor]]:
    mine = range(rank * 24, rank * 24 + 24)
    match case:
        case "shuffled":
            return DataLoader(DATA, 4, shuffle=True)
        case "weighted":
            return DataLoader(DATA, 4, sampler=WeightedRandomSampler(torch.ones(48), 48))
        case "fleet.sampler":
            return DataLoader(DATA, 4, sampler=fleet.sampler(DATA))
        case "DistributedSampler":
            return DataLoader(DATA, 4, sampler=DistributedSampler(DATA))
        case "subset":
            return DataLoader(Subset(DATA, mine), 4, shuffle=True)
        case "own tensors":
            return DataLoader(TensorDataset(torch.arange(48.0)[list(mine)][:, None]), 4, shuffle=True)
        case "shared out in the loop":  # one order on all ranks, of which each takes its part
            order = torch.Generator().manual_seed(3)
            return ([x[rank::2]] for (x,) in DataLoader(DATA, 8, shuffle=True, generator=order))
    raise ValueError(case)


def warnings_of(rank: int, case: str, how: str) -> list[str]:
    torch.manual_seed(rank)  # each process of a script that sets no seed has its own
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 2}) if how == "localsgd" else None
    model = nn.Linear(1, 1)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6), strategy)
    evaluation = iter(DataLoader(DATA, 16))
    next(evaluation)  # another loader that is under way, in order: every rank evaluates all
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for (x,) in batches_of(rank, case):
            train(model, optimizer, x, how)
    return [str(warning.message) for warning in caught]


def train(model: nn.Module, optimizer: Any, x: Tensor, how: str) -> None:
    loss = model(x).square().mean()
    if how == "bare":
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        optimizer.minimize(loss)


@pytest.mark.parametrize(
    ("case", "how", "line"),
    [
        ("shuffled", "minimize", "DataLoader(data, batch_size, sampler=fleet.sampler(data))"),
        ("shuffled", "bare", "DataLoader(data, batch_size, sampler=fleet.sampler(data))"),
        ("shuffled", "localsgd", "DataLoader(data, batch_size, sampler=fleet.sampler(data))"),
        ("weighted", "minimize", "WeightedRandomSampler(weights, num_samples // fleet.worker_num())"),
    ],
)
def test_ranks_that_each_shuffle_all_of_the_data_are_warned_once_with_the_line_to_write(case: str, how: str, line: str) -> None:
    first, second = run_ranks(warnings_of, 2, case, how)
    assert second == []
    assert len(first) == 1
    does = "draws 48 samples" if case == "weighted" else "shuffles all 48 samples"
    assert first[0].startswith(f"each of the 2 ranks {does} by itself")
    assert line in first[0]


@pytest.mark.parametrize("case", ["fleet.sampler", "DistributedSampler", "subset", "own tensors", "shared out in the loop"])
def test_ranks_that_each_have_their_share_are_not_warned(case: str) -> None:
    assert run_ranks(warnings_of, 2, case, "minimize") == [[], []]
