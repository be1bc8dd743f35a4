"""Guards buffers under Local SGD: masks of infinity, and tables that change, or change their shape, while ranks train alone."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_pairs import local, pair, same, train
from tests.helpers.localsgd_runs import loss_of, net


class WithBuffer(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("held", buffer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


MASK = torch.tensor([[0.0, -math.inf, -math.inf], [0.0, 0.0, -math.inf]])


def _masked(rank: int, overlap_steps: int) -> Tensor:
    model, optimizer = pair(WithBuffer(MASK.clone()), local(k_steps=2, overlap_steps=overlap_steps))
    train(rank, model, optimizer, 1, 6)
    held: Tensor = model.held
    return held


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_a_mask_of_minus_infinity_stays_as_it_is(overlap_steps: int) -> None:
    for held in run_ranks(_masked, 2, overlap_steps):
        same(held, MASK)


def _reshaped(rank: int) -> str:
    model, optimizer = pair(WithBuffer(torch.zeros(3)), local(k_steps=2))
    train(rank, model, optimizer, 1, 2)
    model.held = torch.zeros(5)
    return raised(lambda: train(rank, model, optimizer, 3, 4))


def test_a_buffer_that_changes_its_shape_while_ranks_train_alone_is_named() -> None:
    for told in run_ranks(_reshaped, 2):
        assert told.startswith("ConfigError: buffer `held` has the shape (5,), and had (3,)")


def _table(rank: int) -> list[str]:
    model, optimizer = pair(WithBuffer(torch.zeros(16385)), local(k_steps=2))
    train(rank, model, optimizer, 1, 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for update in range(4, 8):
            model.held.add_(rank + 1)
            optimizer.minimize(loss_of(model, rank, update))
    return [str(warning.message) for warning in seen]


def test_a_table_changed_while_ranks_train_alone_is_warned_of_once() -> None:
    first, second = run_ranks(_table, 2)
    assert len(first) == 1 and first[0].startswith("the ranks have changed these buffers differently: `held`.") and not second
