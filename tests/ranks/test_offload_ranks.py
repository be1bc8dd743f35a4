"""Offload on two ranks: the bits and the collectives of training without recompute."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from fleetx import fleet
from fleetx.errors import ConfigError
from tests.helpers.harness import run_ranks
from tests.helpers.parking_runs import LateMover, use_mover
from tests.helpers.recompute_nets import NETS
from tests.helpers.recompute_runs import Trace, assert_ran_again, assert_same, train

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "norms joined": ("u-net", {"sync_batch_norm": True}),
    "bfloat16, merged": (
        "encoder and decoder",
        {"amp": True, "amp_configs": {"dtype": "bfloat16"}, "gradient_merge": True, "merged": 2}
        | {"gradient_merge_configs": {"k_steps": 2}},
    ),
}


def _plain(trace: Trace) -> Trace:
    for step in (*trace.gradients, *trace.states):
        step.update({name: value.numpy() for name, value in step.items()})  # type: ignore[misc]
    trace.losses = [float(loss) for loss in trace.losses]  # type: ignore[misc]
    return trace


def _with_and_without(rank: int, name: str, settings: dict[str, Any]) -> tuple[Trace, Trace, int]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        mover = use_mover(patch, LateMover())
        ours = train(NETS[name], True, rank=rank, size=2, offload=True, **settings)
        return _plain(ours), _plain(train(NETS[name], False, rank=rank, size=2, **settings)), mover.back


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_end_with_the_bits_and_the_collectives_of_training_without(case: str) -> None:
    for ours, without, fetched in run_ranks(_with_and_without, 2, *CASES[case]):
        for step in (*ours.gradients, *ours.states, *without.gradients, *without.states):
            step.update({name: torch.as_tensor(value) for name, value in step.items()})
        ours.losses, without.losses = torch.tensor(ours.losses), torch.tensor(without.losses)
        assert_same(ours, without)
        assert_ran_again(ours, without)
        assert fetched


class SlowOnRankOne(LateMover):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self._speed = 1e12 if rank == 0 else 1e6

    def bytes_per_second(self) -> float:
        return self._speed


def _planned(rank: int, budget: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(8)))
    with pytest.MonkeyPatch.context() as patch:
        use_mover(patch, SlowOnRankOne(rank))
        configs = {"budget": budget, "offload": True, "checkpoints": ["?"]}
        try:
            model, optimizer = fleet.distribute(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                fleet.DistributedStrategy(recompute=True, recompute_configs=configs),
                sample=torch.randn(256 + 64 * rank, 16),
                loss_fn=lambda model, batch: model(batch).square().mean(),
            )
        except ConfigError as error:
            return {"needed": int(str(error).split('"budget": ')[-1].split(",")[0])}
        optimizer.minimize(model(torch.randn(256, 16)).square().mean())
        return asdict(optimizer.memory_plan)


def test_ranks_of_other_speeds_and_batches_make_one_plan() -> None:
    one, other = run_ranks(_planned, 2, 1)
    assert one == other
    one, other = run_ranks(_planned, 2, one["needed"])
    assert one == other and one["parked"] and one["reserved_bytes"] <= one["budget"]
    assert one["seconds_added"] > len(one["parked"]) * 320 * 16 * 4 / 1e6  # by the slower rank, of the larger batch
