"""The sampler in loops of real ranks: equal counts for training, and a word before shards of unequal length make it hang."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fleetx import fleet
from tests.helpers.harness import run_ranks

ODD = TensorDataset(torch.arange(11.0)[:, None])
EVEN = TensorDataset(torch.arange(12.0)[:, None])


def pair() -> tuple[nn.Module, Any]:
    model = nn.Linear(1, 1)
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.001))


def in_order_training(rank: int) -> tuple[list[list[float]], int, list[float]]:
    model, optimizer = pair()
    loader = DataLoader(ODD, 2, sampler=fleet.sampler(ODD, shuffle=False, pad=True))
    read, updates = [], 0
    for (x,) in loader:
        read.append(x.flatten().tolist())
        updates += optimizer.minimize(model(x).square().mean()).updated
    return read, updates, [p.item() for p in model.parameters()]


def test_training_without_shuffling_ends_when_shards_are_padded() -> None:
    (first, updates, weights), (second, others, same) = run_ranks(in_order_training, 2)
    assert first == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    assert second == [[1.0, 3.0], [5.0, 7.0], [9.0, 0.0]]  # the last row is completed from the epoch's start
    assert updates == others == 3
    assert weights == same


def warnings_of(rank: int, case: str) -> list[str]:
    """What is said while two passes begin; no batch is trained on, so that nothing can hang."""
    data = EVEN if case == "equal shards" else ODD
    options: dict[str, Any] = {"padded": {"pad": True}, "cut": {"drop_last": True}}.get(case, {})
    sampler = fleet.sampler(data, shuffle=case == "shuffled", **options)
    loader = DataLoader(data, 2, sampler=sampler)
    if case != "no pair":
        model, _ = pair()
        model.train(case != "eval")
    with warnings.catch_warnings(record=True) as caught, torch.no_grad() if case == "no_grad" else nullcontext():
        warnings.simplefilter("always")
        for _ in range(2):
            list(loader)
    return [str(warning.message) for warning in caught]


def test_training_from_unequal_shards_is_warned_of_once_by_rank_0() -> None:
    first, second = run_ranks(warnings_of, 2, "training")
    assert second == []
    assert len(first) == 1
    assert first[0].startswith("sampler: 11 samples cannot be shared out equally to 2 ranks")
    assert "To train write fleet.sampler(data, shuffle=False, pad=True)" in first[0]


@pytest.mark.parametrize("case", ["eval", "no_grad", "no pair", "equal shards", "padded", "cut", "shuffled"])
def test_evaluation_and_equal_shards_are_not_warned_of(case: str) -> None:
    assert run_ranks(warnings_of, 2, case) == [[], []]
