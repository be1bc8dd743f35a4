"""Gradient merge equals one large batch, to 1e-12 in float64, for a net without BatchNorm."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fleetx import fleet
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch, mlp

K, UPDATES = 4, 5


def _rows(update: int, micro: int, rank: int, weighted: bool) -> int:
    """Unequal micro-batches where weights are given, equal ones where not."""
    return 2 + (update + 3 * micro + 5 * rank) % 7 if weighted else 4


def _merged(rank: int, weighted: bool, avg: bool) -> torch.Tensor:
    model = mlp(torch.float64)
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": K, "avg": avg})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    model, ours = fleet.distribute(model, optimizer, strategy)
    dues = []
    for update in range(UPDATES):
        for micro in range(K):
            x, y = batch(100 * update + 10 * micro + rank, _rows(update, micro, rank, weighted), dtype=torch.float64)
            loss = F.cross_entropy(model(x), y)
            dues.append(ours.minimize(loss, weight=len(x)).due if weighted else ours.minimize(loss).due)
    assert dues == ([False] * (K - 1) + [True]) * UPDATES
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _one_large_batch(size: int, weighted: bool, avg: bool) -> torch.Tensor:
    model = mlp(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for update in range(UPDATES):
        parts = [
            batch(100 * update + 10 * micro + rank, _rows(update, micro, rank, weighted), dtype=torch.float64)
            for micro in range(K)
            for rank in range(size)
        ]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        (F.cross_entropy(model(x), y) * (1 if avg else K)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("weighted", "avg"), [(False, True), (True, True), (False, False)])
def test_k_micro_batches_equal_one_large_batch(size: int, weighted: bool, avg: bool) -> None:
    for merged in run_ranks(_merged, size, weighted, avg):
        torch.testing.assert_close(merged, _one_large_batch(size, weighted, avg), rtol=1e-12, atol=1e-12)


def _all_padding(rank: int) -> list[torch.Tensor]:
    model = mlp()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(rank)
    optimizer.minimize(F.cross_entropy(model(x), y), weight=0)
    return [(p - b).detach() for p, b in zip(model.parameters(), before, strict=True)]


def test_weights_that_are_all_zero_change_nothing_and_make_no_nan() -> None:
    for differences in run_ranks(_all_padding, 2):
        for difference in differences:
            torch.testing.assert_close(difference, torch.zeros_like(difference), rtol=0, atol=0)
