"""Offload on two ranks: the bits and the collectives of training without recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import run_ranks
from parking_runs import LateMover, use_mover
from recompute_nets import NETS
from recompute_runs import Trace, assert_ran_again, assert_same, train

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
