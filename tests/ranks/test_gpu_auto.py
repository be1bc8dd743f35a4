"""`auto` on a GPU: the memory it predicts is what it takes, and a small card is no reason to fail. Skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleetx import fleet
from tests.ranks.test_gpu_memory import Encoder, alone_and_exact, cleared, loss_fn, sentences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
__all__ = ["alone_and_exact"]  # the fixture of every test here too
ROWS, LAYERS, TIGHT = 64, 8, 0.7
"""Of a plain step's peak."""


def planned(**configs: Any) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """The optimizer, and the weights before and after."""
    cleared()
    torch.manual_seed(0)
    model = Encoder(layers=LAYERS).cuda()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    strategy = fleet.DistributedStrategy(auto=True, auto_configs=configs)
    model, face = fleet.distribute(model, optimizer, strategy, sample=sentences(ROWS), loss_fn=loss_fn)
    return face, before, [p.detach() for p in model.parameters()]


def test_a_plan_keeps_to_its_memory_as_predicted_and_leaves_no_trace() -> None:
    plain, before, after = planned(risk="exact")
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)) and not plain.state
    row = plain.plan.row("fp32")
    assert plain.plan.chosen == "fp32" and row.measured_bytes == pytest.approx(row.predicted_bytes, rel=0.05)
    limit = int(TIGHT * row.measured_bytes)
    tight, before, after = planned(risk="exact", memory=limit)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)) and not tight.state
    row = tight.plan.row(tight.plan.chosen)
    assert tight.plan.strategy.recompute and row.measured_bytes <= limit
    assert row.measured_bytes == pytest.approx(row.predicted_bytes, rel=0.05)


def test_a_global_batch_is_made_up_of_micro_batches_that_fit_a_small_card() -> None:
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.5e9 / whole)
    try:
        face, _, _ = planned(memory="1GB", global_batch=16 * ROWS)
        plan = face.plan
        assert plan.micro_batch * plan.merge_steps == 16 * ROWS
        assert plan.row(plan.chosen).measured_bytes <= 1e9
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
