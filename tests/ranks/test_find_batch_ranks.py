"""The batch finder and rehearsals on two ranks: one answer, also where one runs out of memory; none waits, nothing is left."""

from __future__ import annotations

import gc
import hashlib
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.dist import world
from fleetx.engine.dry_run import Rehearsal, Sample
from fleetx.engine.optimizer import FleetOptimizer
from fleetx.errors import FleetError, FleetWarning, RecomputeError
from tests.helpers.harness import raised, run_ranks
from tests.helpers.recompute_nets import WIDTH, Norm
from tests.helpers.recompute_runs import rows

BUDGET = 50_000


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Norm(), Norm(), Norm()]), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = SmallNet()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A fingerprint: weights, buffers, modes, gradients, the optimizer's state and groups, random numbers."""
    hasher = hashlib.sha256()
    for value in [*model.state_dict().values(), *(p.grad for p in model.parameters())]:
        hasher.update(b"none" if value is None else value.detach().numpy().tobytes())
    told = optimizer.state_dict()
    rest = [
        [module.training for module in model.modules()],
        ["forward" in vars(module) for module in model.modules()],
        told["param_groups"],
        [[(k, v if not isinstance(v, Tensor) else v.tolist()) for k, v in s.items()] for s in told["state"].values()],
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        torch.get_rng_state().tolist(),
    ]
    hasher.update(repr(rest).encode())
    return hasher.hexdigest()


# --- one answer -----------------------------------------------------------------------------------------------------------------


def _found(rank: int, settings: dict[str, Any], limit: int | None, global_batch: int | None) -> dict[str, Any]:
    """`limit`: rank 1 runs out of memory above so many rows."""
    torch.set_num_threads(1)
    model, optimizer = pair()
    torch.manual_seed(rank)  # each rank has random numbers of its own

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        if limit is not None and rank == 1 and len(batch[0]) > limit:
            raise torch.OutOfMemoryError(f"no memory for {len(batch[0])} rows")
        return loss

    before = everything(model, optimizer)
    told: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)

        def find() -> None:
            found = fleet.find_batch(
                model,
                optimizer,
                fleet.DistributedStrategy(**settings),
                sample=rows(rank, 32),
                loss_fn=loss_fn,
                budget=BUDGET,
                global_batch=global_batch,
            )
            told["most"], told["stored"] = found.most, found.stored
            told["tried"] = [
                (b.size, b.samples_per_second, b.peak_bytes, b.recomputed, b.merge_steps, b.strategy.to_json())
                for b in found.tried
            ]
            told["fastest"], told["largest"] = found.fastest.size, found.largest.size
            told["own rows"] = torch.equal(found.largest.sample[0][:32], rows(rank, 32)[0][: found.largest.size])

        told["said"] = raised(find)
    told["unchanged"] = everything(model, optimizer) == before
    gc.collect()
    told["trains"] = raised(lambda: _three_updates(rank, model, optimizer))
    told["weights"] = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return told


def _three_updates(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model, face = fleet.distribute(model, optimizer, fleet.DistributedStrategy())
    for step in range(3):
        face.minimize(cross_entropy(model, rows(2 * step + rank)))


CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "plain": ({}, None),
    "global batch": ({}, 480),
    "joined norms": ({"sync_batch_norm": True}, None),
    "localsgd": ({"localsgd": True, "localsgd_configs": {"k_steps": 2}}, None),
    "powersgd": ({"powersgd": True, "powersgd_configs": {"rank": 1, "begin_step": 0, "min_compression": 1.0}}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_find_the_same_and_are_as_before(case: str) -> None:
    settings, global_batch = CASES[case]
    first, second = run_ranks(_found, 2, settings, None, global_batch)
    assert first["said"] == second["said"] == "nothing raised"
    assert {key: value for key, value in first.items()} == {key: value for key, value in second.items()}
    assert first["unchanged"] and first["own rows"] and first["trains"] == "nothing raised"
    assert first["most"] > first["stored"] > 0 and first["largest"] <= first["most"]
    for size, speed, peak, _, steps, _ in first["tried"]:
        assert peak <= BUDGET and speed > 0
        assert global_batch is None or size * steps * 2 == global_batch


def test_a_global_batch_that_two_ranks_cannot_share_is_refused_on_both() -> None:
    for told in run_ranks(_found, 2, {}, None, 481):
        assert told["said"].startswith("ConfigError: global_batch is 481, which 2 ranks cannot share equally")
        assert told["unchanged"] and told["trains"] == "nothing raised"


@pytest.mark.parametrize("limit", [130, 110, 60, 20])
def test_one_rank_that_runs_out_of_memory_bounds_the_batch_of_both(limit: int) -> None:
    """About 145 rows fit into the budget."""
    first, second = run_ranks(_found, 2, {}, limit, None)
    assert first["said"] == second["said"] == "nothing raised"
    assert first["most"] == second["most"] and limit - max(2, limit // 20) <= first["most"] <= limit
    assert first["tried"] == second["tried"] and all(row[0] <= limit for row in first["tried"])
    assert first["unchanged"] and second["unchanged"]
    assert first["trains"] == "nothing raised" and first["weights"] == second["weights"]


def test_joined_norms_leave_no_rank_waiting_where_one_rank_runs_out_of_memory() -> None:
    first, second = run_ranks(_found, 2, {"sync_batch_norm": True}, 120, None)
    assert first["said"] == second["said"] == "nothing raised" and first["most"] == second["most"] <= 120
    assert first["unchanged"] and second["unchanged"] and first["weights"] == second["weights"]


def test_a_rank_that_has_memory_for_nothing_is_told_of_on_both() -> None:
    for told in run_ranks(_found, 2, {}, 1, None):
        assert told["said"].startswith("ConfigError: find_batch: not even a batch of 2 fits") and told["unchanged"]
        assert told["trains"] == "nothing raised"


def _fails_on_one(rank: int) -> tuple[str, bool, str]:
    model, optimizer = pair()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        if rank == 1 and len(batch[0]) > 40:
            raise KeyError("a word that is not in the vocabulary")
        return loss

    before = everything(model, optimizer)
    said = raised(lambda: fleet.find_batch(model, optimizer, sample=rows(rank, 32), loss_fn=loss_fn, budget=BUDGET))
    same = everything(model, optimizer) == before
    gc.collect()
    return said, same, raised(lambda: _three_updates(rank, model, optimizer))


def test_an_error_of_one_ranks_own_is_raised_on_both() -> None:
    (first, *rest_of_first), (second, *rest_of_second) = run_ranks(_fails_on_one, 2)
    assert "rank 1" in first and "not in the vocabulary" in first and first.startswith("FleetError")
    assert second.startswith("KeyError") and "not in the vocabulary" in second
    assert rest_of_first == rest_of_second == [True, "nothing raised"]


# --- a verdict for all ----------------------------------------------------------------------------------------------------------

ERRORS: dict[str, Any] = {
    "memory": lambda: torch.OutOfMemoryError("no more memory\nand a second line"),
    "unit": lambda: RecomputeError("blocks.1 computes something else", unit="blocks.1"),
    "other": lambda: KeyError("a word"),
}


def _verdict(rank: int, kinds: tuple[str | None, str | None]) -> tuple[str, str | None, str]:
    model, inner = pair()
    model, face = fleet.distribute(model, inner, fleet.DistributedStrategy())
    assert isinstance(face, FleetOptimizer)
    here = world.current()
    rehearsal = Rehearsal(model, face, cross_entropy, Sample(rows(rank), here.device), here.comm, here.device)

    def work() -> int:
        kind = kinds[rank]
        if kind is not None:
            raise ERRORS[kind]()
        return 7 + rank

    unit, said = None, ""
    with rehearsal.leaving_no_trace():
        try:
            said = f"found {rehearsal.everywhere(work)}"
        except Exception as error:
            unit = getattr(error, "unit", None)
            said = f"{type(error).__name__}{'' if isinstance(error, FleetError) else ' of its own'}: {error}"
    return said, unit, raised(lambda: face.minimize(cross_entropy(model, rows(rank))))


def test_where_no_rank_fails_each_rank_has_its_own_result() -> None:
    assert [told[0] for told in run_ranks(_verdict, 2, (None, None))] == ["found 7", "found 8"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ERRORS)
def test_a_failure_of_one_rank_is_of_one_kind_on_both(kind: str, failing: int) -> None:
    kinds = (kind, None) if failing == 0 else (None, kind)
    told = run_ranks(_verdict, 2, kinds)
    own, other = told[failing], told[1 - failing]
    if kind == "memory":
        assert own[0] == "OutOfMemory: no more memory" and other[0] == f"OutOfMemory: on rank {failing}: no more memory"
    if kind == "unit":
        assert own == other and own[0].startswith("RecomputeError: blocks.1 computes") and own[1] == "blocks.1"
    if kind == "other":
        assert own[0] == "KeyError of its own: 'a word'"
        assert other[0].startswith(f"FleetError: a rehearsed step failed on rank {failing}: KeyError: 'a word'")
    assert own[2] == other[2] == "nothing raised"


@pytest.mark.parametrize("kinds", [(a, b) for a in ERRORS for b in ERRORS], ids=str)
def test_where_both_fail_the_first_ones_kind_counts_on_both(kinds: tuple[str, str]) -> None:
    first, second = run_ranks(_verdict, 2, kinds)
    expected = {"memory": ("OutOfMemory",), "unit": ("RecomputeError",), "other": ("KeyError of its own", "FleetError")}[kinds[0]]
    assert first[0].split(":")[0] == expected[0] and second[0].split(":")[0] in expected
    assert first[1] == second[1] and first[2] == second[2] == "nothing raised"


# --- the look at the first batch ------------------------------------------------------------------------------------------------


def _warned(rank: int, budget: int | None, equal: bool, finds: bool) -> list[str]:
    model, optimizer = pair()
    strategy = fleet.DistributedStrategy()
    if budget is not None:
        strategy.recompute, strategy.recompute_configs = True, {"budget": budget}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if finds:
            fleet.find_batch(model, optimizer, sample=rows(5, 32), loss_fn=cross_entropy, budget=BUDGET)
            gc.collect()
        model, face = fleet.distribute(model, optimizer, strategy, sample=rows(5, 32), loss_fn=cross_entropy)
        silent_so_far = not caught
        for step in range(2):
            face.minimize(cross_entropy(model, rows(step if equal else 10 * step + rank)))
    return [str(warning.message)[:35] for warning in caught] if silent_so_far else ["too early"]


@pytest.mark.parametrize(("budget", "finds"), [(40_000, False), (None, True)])
def test_equal_samples_set_no_warning_off_and_equal_batches_still_do(budget: int | None, finds: bool) -> None:
    """The sample of a rehearsal is the same on both ranks, which is no mistake; a first batch that is, is."""
    assert run_ranks(_warned, 2, budget, False, finds) == [[], []]
    first, second = run_ranks(_warned, 2, budget, True, finds)
    assert first == ["both ranks saw the same first batch"] and second == []
