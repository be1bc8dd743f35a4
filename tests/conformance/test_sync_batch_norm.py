"""Synchronised batch norm equals one process on the joined batch, also when ranks hold unequal shares."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.strategies.sync_batch_norm import joined_moments
from tests.helpers.harness import run_ranks
from tests.helpers.models import batch

STEPS = 4


def _net(affine: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6, affine=affine, momentum=None if not affine else 0.1)
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 25, 4)).double()


def _rows(rank: int, step: int) -> int:
    return 1 + (3 * rank + step) % 5


def _synchronised(rank: int, affine: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    model = _net(affine)
    model, optimizer = fleet.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), fleet.DistributedStrategy(sync_batch_norm=True)
    )
    for step in range(STEPS):
        x, y = batch(10 * step + rank, _rows(rank, step), (2, 5, 5), torch.float64)
        optimizer.minimize(F.cross_entropy(model(x), y), weight=len(x))
    model.eval()
    with torch.no_grad():
        probe = model(batch(999, 3, (2, 5, 5), torch.float64)[0])
    return {name: t.clone() for name, t in model.state_dict().items()}, probe


def _joined(size: int, affine: bool) -> dict[str, torch.Tensor]:
    model = _net(affine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        parts = [batch(10 * step + rank, _rows(rank, step), (2, 5, 5), torch.float64) for rank in range(size)]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_unequal_shares_equal_one_process_on_the_joined_batch(size: int, affine: bool) -> None:
    expected = _joined(size, affine)
    for state, _ in run_ranks(_synchronised, size, affine):
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)


def _sixteen_bit(rank: int) -> list[str]:
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6)).to(memory_format=torch.channels_last)
    model, _ = fleet.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        fleet.DistributedStrategy(sync_batch_norm=True, find_unused_parameters=True),
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch(rank, 4, (2, 5, 5))[0].contiguous(memory_format=torch.channels_last))
    return [str(out.dtype), str(model[1].running_mean.dtype), str(bool(out.isfinite().all()))]


def test_sixteen_bit_inputs_keep_float32_statistics() -> None:
    assert run_ranks(_sixteen_bit, 2) == [["torch.bfloat16", "torch.float32", "True"]] * 2


def test_moments_of_parts_join_to_the_moments_of_the_whole() -> None:
    x = torch.randn(50, 3, dtype=torch.float64) + 1e6
    parts = [x[:1], x[1:20], x[20:20], x[20:]]
    counts = torch.tensor([[float(len(p))] for p in parts], dtype=torch.float64)
    means = torch.stack([p.mean(0) if len(p) else torch.zeros(3, dtype=torch.float64) for p in parts])
    squares = torch.stack([((p - p.mean(0)) ** 2).sum(0) if len(p) else torch.zeros(3, dtype=torch.float64) for p in parts])
    total, mean, square = joined_moments(counts, means, squares)
    assert total == 50
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(square / total, x.var(0, correction=0), rtol=1e-8, atol=0)
