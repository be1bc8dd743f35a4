"""Compressed training saved by some ranks and resumed by others: what was kept back is shared out again, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from tests.helpers.harness import raised, run_ranks
from tests.helpers.localsgd_runs import on_nodes, rendezvous

DGC = {"dgc": True, "dgc_configs": {"sparsity": [0.9], "min_numel": 50}}
POWERSGD = {"powersgd": True, "powersgd_configs": {"rank": 1, "begin_step": 0, "min_compression": 1.0}}
QUANTISED = {"quantized_allreduce": True, "quantized_allreduce_configs": {"block": 16}}
STRATEGIES = {"dgc": DGC, "powersgd": POWERSGD, "quantised": QUANTISED}


def _pair(strategy: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: tuple[nn.Module, Any] = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**strategy))
    return found


def _train(rank: int, model: nn.Module, optimizer: Any, updates: range) -> None:
    for update in updates:
        random = torch.Generator().manual_seed(100 * update + rank)
        x = torch.randn(5, 12, generator=random)
        optimizer.minimize(nn.functional.mse_loss(model(x), x[:, :8]))


def _shares(optimizer: Any) -> dict[str, dict[str, Tensor]]:
    state = optimizer.pipeline.stages.reduce.state_dict()["shares"]
    return {what: {name: t.double().clone() for name, t in named.items()} for what, named in state.items()}


def _save(rank: int, strategy: dict[str, Any], folder: str) -> Any:
    fleet.init()
    model, optimizer = _pair(strategy)
    _train(rank, model, optimizer, range(6))
    fleet.save_checkpoint(folder, step=6, model=model, optimizer=optimizer)
    return _shares(optimizer)


def _load(rank: int, strategy: dict[str, Any], folder: str, allowed: bool) -> Any:
    fleet.init()
    model, optimizer = _pair(strategy)
    if not allowed:
        return raised(lambda: fleet.load_checkpoint(folder, model=model, optimizer=optimizer))
    fleet.load_checkpoint(folder, model=model, optimizer=optimizer, new_world_size=True)
    shares = _shares(optimizer)
    _train(rank, model, optimizer, range(6, 9))
    return shares, [p.detach().clone() for p in model.parameters()]


def _total(ranks: list[Any], what: str, name: str) -> Tensor:
    return torch.stack([shares[what][name] for shares in ranks]).sum(0)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2), (2, 1)])
@pytest.mark.parametrize("part", STRATEGIES)
def test_what_was_kept_back_is_shared_out_in_equal_parts_among_other_ranks(
    part: str, before: int, after: int, tmp_path: Path
) -> None:
    saved = run_ranks(_save, before, STRATEGIES[part], str(tmp_path))
    loaded = run_ranks(_load, after, STRATEGIES[part], str(tmp_path), True)
    assert all(bool(tensor.any()) for named in saved[0].values() for tensor in named.values())
    for what, named in saved[0].items():
        for name in named:
            total = _total(saved, what, name)
            for shares, _ in loaded:
                torch.testing.assert_close(shares[what][name], total / after, rtol=1e-6, atol=1e-9)
    for _, weights in loaded[1:]:
        for mine, theirs in zip(weights, loaded[0][1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_the_ranks_of_a_node_have_one_share_together(tmp_path: Path) -> None:
    strategy = {"dgc": True, "dgc_configs": {**DGC["dgc_configs"], "two_level": True}}
    saved = run_ranks(on_nodes, 4, (0, 0, 1, 1), rendezvous(tmp_path), _save, strategy, str(tmp_path / "saved"))
    loaded = run_ranks(_load, 2, DGC, str(tmp_path / "saved"), True)
    for name in saved[0]["unsent"]:
        torch.testing.assert_close(saved[0]["unsent"][name], saved[1]["unsent"][name], rtol=0, atol=0)
        total = saved[0]["unsent"][name] + saved[2]["unsent"][name]
        for shares, _ in loaded:
            torch.testing.assert_close(shares["unsent"][name], total / 2, rtol=1e-6, atol=1e-9)


def test_another_number_of_ranks_must_be_allowed(tmp_path: Path) -> None:
    run_ranks(_save, 2, DGC, str(tmp_path))
    for told in run_ranks(_load, 3, DGC, str(tmp_path), False):
        assert "saved by 2 ranks, and this run has 3" in told and "new_world_size=True" in told
