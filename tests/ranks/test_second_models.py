"""Guards what is said about a second model under one optimizer: the parts of the strategy that act on the model alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fleetx import fleet
from tests.helpers.harness import run_ranks


def _warnings(rank: int, syncs: bool) -> list[str]:
    encoder, head = nn.Linear(4, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    strategy = fleet.DistributedStrategy(sync_batch_norm=syncs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        fleet.distribute(encoder, optimizer, strategy)
    return [str(warning.message) for warning in caught if "outside the model" in str(warning.message)]


@pytest.mark.parametrize("syncs", [False, True])
def test_the_warning_names_sync_batch_norm_where_it_has_no_effect_on_the_second_model(syncs: bool) -> None:
    (warning,), none = run_ranks(_warnings, 2, syncs)
    assert none == []
    assert "fleet.distribute(torch.nn.ModuleList([model, other]), optimizer, strategy)" in warning
    assert ("strategy.sync_batch_norm has no effect on it" in warning) == syncs, warning
