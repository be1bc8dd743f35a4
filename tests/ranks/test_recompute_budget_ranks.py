"""A budget on two ranks: one plan for both, however unlike their batches; the training of one without; no rank waits for ever."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.recompute.memory_probe import CountingProbe
from tests.helpers.budget_nets import lasting_bytes
from tests.helpers.budget_runs import AMP, cross_entropy, distribute
from tests.helpers.harness import raised, run_ranks
from tests.helpers.recompute_nets import NETS
from tests.helpers.recompute_runs import random_now, rows, seed

PROMPT_S = 60.0
"""A rank that waits in a collective would be given up after 120 s by the harness."""
SYNC = {"sync_batch_norm": True}
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}


def bytes_of_step(name: str, count: int) -> int:
    """Without recompute, on one rank, as a ground for budgets."""
    seed()
    model, batch = NETS[name].build(), rows(0, count)
    probe = CountingProbe(lambda: [*model.parameters(), *model.buffers(), *batch])
    with probe.watching():
        cross_entropy(model, batch).backward()
        return probe.peak()


def _plan(rank: int, name: str, counts: tuple[int, int], budget: int, settings: dict[str, Any]) -> tuple[Any, str, int]:
    seed()
    batch, out = rows(rank, counts[rank]), io.StringIO()
    with contextlib.redirect_stdout(out):
        model, optimizer = distribute(NETS[name].build(), budget, batch, **settings)
    plan = optimizer.memory_plan
    optimizer.minimize(cross_entropy(model, batch))
    probe = CountingProbe(lambda: [])
    before = lasting_bytes(model, optimizer, batch)
    with probe.watching():
        optimizer.minimize(cross_entropy(model, batch))
        real = before + probe.peak()
    told = (
        plan.budget,
        plan.units,
        plan.recomputed,
        plan.predicted_bytes,
        plan.real_bytes,
        plan.reserved_bytes,
        plan.seconds_added,
    )
    return told, out.getvalue(), real


@pytest.mark.parametrize("name", ["encoder and decoder", "convolutions"])
@pytest.mark.parametrize("counts", [(512, 512), (512, 300), (90, 512)], ids=["equal", "rank 0 more", "rank 1 more"])
def test_both_ranks_have_one_plan_which_holds_for_the_larger_batch_and_rank_0_alone_prints_it(
    name: str, counts: tuple[int, int]
) -> None:
    budget = int(0.75 * bytes_of_step(name, max(counts)))
    first, second = run_ranks(_plan, 2, name, counts, budget, {})
    assert first[0] == second[0]
    assert first[0][2], "nothing is computed again"
    assert max(first[2], second[2]) <= budget
    assert first[1].count("recompute: ") == 1 and "recompute: " not in second[1]


def _trained(rank: int, name: str, budget: int | None, settings: dict[str, Any], merged: int) -> Any:
    seed()
    model, optimizer = distribute(NETS[name].build(), budget, rows(rank, 128), **settings)
    recomputed = () if budget is None else optimizer.memory_plan.recomputed
    seed(rank + 1)
    losses = []
    for index in range(4 * merged):
        loss = cross_entropy(model, rows(2 * index + rank, 64))
        losses.append(loss.item())
        optimizer.minimize(loss)
    return recomputed, losses, {key: value.tolist() for key, value in model.state_dict().items()}, random_now()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "norms apart": ("convolutions", {}),
    "norms joined": ("convolutions", SYNC),
    "norms joined in a u-net, merged": ("u-net", SYNC | MERGED),
    "norms joined, bfloat16": ("u-net", SYNC | AMP["bfloat16"]),
    "transformer": ("torch transformer", {}),
    "localsgd": ("encoder and decoder", {"localsgd": True, "localsgd_configs": {"k_steps": 2}}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_by_a_plan_as_without_one(case: str) -> None:
    name, settings = CASES[case]
    share = 0.6 if "amp" in settings else 0.9 if name == "convolutions" else 0.75
    budget = int(share * bytes_of_step(name, 128))
    merged = 2 if "gradient_merge" in settings else 1
    planned = run_ranks(_trained, 2, name, budget, settings, merged)
    plain = run_ranks(_trained, 2, name, None, settings, merged)
    assert planned[0][0] == planned[1][0] != ()
    for ours, theirs in zip(planned, plain, strict=True):
        assert ours[1:] == theirs[1:]


def _fails(rank: int, call: int, kind: str) -> tuple[str, float, bool, list[float]]:
    left = [call]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        left[0] -= 1
        loss = cross_entropy(model, batch)
        if rank == 1 and left[0] == 0:
            raise torch.OutOfMemoryError("made up: not enough memory") if kind == "memory" else ValueError("made up: a bad row")
        return loss

    seed()
    model = NETS["convolutions"].build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    started = time.perf_counter()
    told = raised(lambda: distribute(model, "1GB", rows(rank, 64), loss_fn=loss_fn, **SYNC))
    seconds = time.perf_counter() - started
    restored = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    # Both ranks still answer each other: another model is distributed and trained.
    seed()
    other, optimizer = distribute(NETS["convolutions"].build(), None, None, **SYNC)
    losses = [float(optimizer.minimize(cross_entropy(other, rows(rank, 32))).loss) for _ in range(2)]
    return told, seconds, restored, losses


@pytest.mark.parametrize("kind", ["memory", "other"])
@pytest.mark.parametrize("call", range(1, 8))
def test_a_failure_of_one_rank_in_any_rehearsed_step_is_heard_by_both_at_once(call: int, kind: str) -> None:
    ranks = run_ranks(_fails, 2, call, kind)
    for told, seconds, restored, losses in ranks:
        assert seconds < PROMPT_S and restored and len(losses) == 2
        if kind == "memory" and call == 7:  # the plan's own step: another plan may fit, and the batch is simply too large
            assert told.startswith(("ConfigError", "nothing raised"))
        elif kind == "memory":  # where a step cannot be measured, smaller ones are
            assert told == "nothing raised"
        else:
            assert told.startswith(("ValueError", "FleetError")) and "made up: a bad row" in told
    assert kind == "memory" or "rank 1" in ranks[0][0]
    assert (ranks[0][0] == "nothing raised") == (ranks[1][0] == "nothing raised")
