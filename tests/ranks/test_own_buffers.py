"""Buffers that each rank fills itself: kept equal by one rule whatever their size, reported once, or left to each rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.engine.buffers.buffer_kinds import LARGE_NUMEL
from fleetx.errors import FleetWarning
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch

SMALL, LARGE = 64, LARGE_NUMEL + 64
LOCAL_SGD: dict[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 2, "begin_step": 1}}


class Bank(nn.Module):
    """Keeps the outputs of its own rank in a queue, as MoCo does; beside it a counter, a constant and a norm layer."""

    def __init__(self, entries: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.memory = nn.Module()
        self.memory.register_buffer("queue", torch.zeros(entries, dtype=dtype))
        self.memory.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("positions", torch.arange(LARGE, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x))
        if self.training:
            with torch.no_grad():
                self.memory.queue[: out.numel()] = out.detach().flatten().to(self.memory.queue.dtype)
                self.memory.filled += int((x > 0).sum())
                self.steps += 1
        return out


def built(entries: int, strategy: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Bank, Any]:
    torch.manual_seed(0)
    model = Bank(entries, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fleet.distribute(model, optimizer, fleet.DistributedStrategy(**strategy))  # type: ignore[return-value]


def train(model: Bank, optimizer: Any, rank: int, steps: range) -> list[Tensor]:
    """What each rank had in its queue after the forward of each step."""
    own = []
    for step in steps:
        x, y = batch(2 * step + rank)
        loss = F.cross_entropy(model(x), y)
        own.append(model.memory.queue.clone())
        optimizer.minimize(loss)
    return own


def _trained(rank: int, entries: int, strategy: dict[str, Any], steps: int, dtype: torch.dtype) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FleetWarning)
        model, optimizer = built(entries, {"desync_check_steps": 1} | strategy, dtype)
        own = train(model, optimizer, rank, range(steps))
    return {
        "own": own,
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "warnings": [str(w.message) for w in caught if issubclass(w.category, FleetWarning)],
    }


def trained(entries: int, steps: int = 4, size: int = 2, dtype: torch.dtype = torch.float32, **strategy: Any) -> list[Any]:
    return run_ranks(_trained, size, entries, strategy, steps, dtype)


def same(ranks: list[Any], name: str) -> bool:
    return all(torch.equal(ranks[0]["buffers"][name], other["buffers"][name]) for other in ranks[1:])


# --- one rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [{}, LOCAL_SGD, {"on_nan_inf": "off"}, {"powersgd": True}], ids=str)
@pytest.mark.parametrize("entries", [SMALL, LARGE])
def test_every_buffer_is_kept_equal_whatever_its_size(entries: int, strategy: dict[str, Any]) -> None:
    ranks = trained(entries, steps=5, **strategy)
    assert all(same(ranks, name) for name in ranks[0]["buffers"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_a_large_one_becomes_the_mean_of_the_ranks_and_integers_rank_0s(dtype: torch.dtype) -> None:
    ranks = trained(LARGE, steps=1, size=3, dtype=dtype)
    own = [rank["own"][0] for rank in ranks]
    expected = torch.stack([o.to(torch.complex128) for o in own]).mean(0) if dtype != torch.int64 else own[0]
    for rank in ranks:
        got = rank["buffers"]["memory.queue"]
        assert got.dtype == dtype and not torch.equal(own[0], own[1])
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(got.to(expected.dtype), expected, rtol=tolerance, atol=tolerance)
        assert not got[own[0].nonzero().max() + 1 :].any()  # what no rank has written is as it was, to the bit


def test_a_small_one_and_a_large_one_get_the_same_values() -> None:
    small, large = trained(SMALL)[0]["buffers"]["memory.queue"], trained(LARGE)[0]["buffers"]["memory.queue"]
    torch.testing.assert_close(large[:SMALL], small)


# --- a warning, once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [{}, LOCAL_SGD], ids=str)
@pytest.mark.parametrize("entries", [SMALL, LARGE])
def test_a_warning_names_the_buffer_once_on_rank_0_and_the_line_to_write(entries: int, strategy: dict[str, Any]) -> None:
    first, second = trained(entries, steps=9, **strategy)
    assert not second["warnings"]
    text = "\n".join(first["warnings"])
    assert text.count("`memory.queue`") == 1 and text.count("`memory.filled`") == 1
    assert "strategy.local_buffers = [" in text and '"memory.queue"' in text
    assert "steps" not in text and "running_mean" not in text and "positions" not in text


def test_no_warning_where_all_ranks_see_the_same() -> None:
    for rank in run_ranks(_fed_alike, 2):
        assert rank == []


def _fed_alike(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FleetWarning)
        model, optimizer = built(LARGE, {})
        train(model, optimizer, 0, range(4))
    return [str(w.message) for w in caught if "differently" in str(w.message)]


# --- each rank's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [{}, LOCAL_SGD, {"on_nan_inf": "skip"}], ids=str)
@pytest.mark.parametrize("entries", [SMALL, LARGE])
def test_local_buffers_stay_each_ranks_own_and_the_rest_is_equal(entries: int, strategy: dict[str, Any]) -> None:
    ranks = trained(entries, steps=5, local_buffers=["memory.*"], **strategy)
    for rank in ranks:
        torch.testing.assert_close(rank["buffers"]["memory.queue"], rank["own"][-1], rtol=0, atol=0)
        assert rank["warnings"] == []
    assert not same(ranks, "memory.queue") and not same(ranks, "memory.filled")
    assert all(same(ranks, name) for name in ranks[0]["buffers"] if not name.startswith("memory."))


def _traffic(rank: int, strategy: dict[str, Any]) -> float:
    model, optimizer = built(LARGE, strategy)
    train(model, optimizer, rank, range(1))
    x, y = batch(rank)
    return float(optimizer.minimize(F.cross_entropy(model(x), y)).bytes_sent)


def test_a_constant_table_and_a_local_buffer_do_not_travel() -> None:
    for sent in run_ranks(_traffic, 2, {"local_buffers": ["memory.queue"]}):
        assert sent < LARGE


def _unknown(rank: int, name: str) -> str:
    return raised(lambda: built(SMALL, {"local_buffers": [name]}))


def test_a_name_that_no_buffer_has_is_refused_on_all_ranks() -> None:
    for told in run_ranks(_unknown, 2, "memory.queu"):
        assert told.startswith("ConfigError: strategy.local_buffers names `memory.queu`; no buffer of the model has that name.")
        assert "`memory.queue`" in told


# --- changed at other moments, and in other ways ------------------------------------------------------------------------------


def _between(rank: int, entries: int, desync: int) -> list[Tensor]:
    """Each rank writes after backward and after the step: both are made equal by the next update."""
    warnings.simplefilter("ignore", FleetWarning)
    model, optimizer = built(entries, {"desync_check_steps": desync})
    for step in range(3):
        x, y = batch(2 * step + rank)
        optimizer.backward(F.cross_entropy(model.eval()(x), y))
        model.memory.queue[rank] += 1
        optimizer.step()
        optimizer.zero_grad()
        model.memory.queue[2 + rank] += 1
    loss = F.cross_entropy(model(x), y)
    model.memory.queue.zero_()[rank] = 1
    optimizer.minimize(loss)
    return [model.memory.queue.clone()]


@pytest.mark.parametrize("entries", [SMALL, LARGE])
def test_writes_between_backward_and_step_are_no_desync(entries: int) -> None:
    for (queue,) in run_ranks(_between, 2, entries, 1):
        torch.testing.assert_close(queue[:3], torch.tensor([0.5, 0.5, 0.0]))


def _changed_by_one(rank: int) -> Tensor:
    warnings.simplefilter("ignore", FleetWarning)
    model, optimizer = built(LARGE, {})
    model.eval()
    for step in range(4):
        x, y = batch(2 * step + rank)
        if rank == 1 and step == 2:
            model.memory.queue = torch.full_like(model.memory.queue, 3.0)
        optimizer.minimize(F.cross_entropy(model(x), y))
    return model.memory.queue.clone()


def test_a_change_on_one_rank_alone_brings_all_ranks_together() -> None:
    for queue in run_ranks(_changed_by_one, 2):
        torch.testing.assert_close(queue, torch.full_like(queue, 1.5), rtol=0, atol=0)


def _grown(rank: int, by: int, strategy: dict[str, Any]) -> tuple[list[str], Tensor]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FleetWarning)
        model, optimizer = built(LARGE, {"desync_check_steps": 1} | strategy)
        model.eval()
        for step in range(4):
            x, y = batch(2 * step + rank)
            if step:
                model.memory.queue = torch.ones(LARGE + step + by * rank)
            optimizer.minimize(F.cross_entropy(model(x), y))
    return [str(w.message) for w in caught if "queue" in str(w.message)], model.memory.queue.clone()


@pytest.mark.parametrize("strategy", [{}, LOCAL_SGD], ids=str)
def test_a_table_may_grow_alike_on_all_ranks(strategy: dict[str, Any]) -> None:
    for told, queue in run_ranks(_grown, 2, 0, strategy):
        assert told == [] and queue.shape == (LARGE + 3,)


@pytest.mark.parametrize("strategy", [{}, LOCAL_SGD], ids=str)
def test_one_that_grows_differently_is_left_to_each_rank_with_a_warning(strategy: dict[str, Any]) -> None:
    (first, mine), (second, theirs) = run_ranks(_grown, 2, 5, strategy)
    assert second == [] and mine.shape == (LARGE + 3,) and theirs.shape == (LARGE + 8,)
    assert len(first) == 1 and "has different shapes on the ranks" in first[0] and 'local_buffers = ["memory.queue"]' in first[0]


def _through_data(rank: int) -> str:
    model, optimizer = built(LARGE, {"desync_check_steps": 2})
    model.eval()
    model.memory.queue.data.fill_(rank)
    x, y = batch(rank)
    optimizer.minimize(F.cross_entropy(model(x), y))
    return raised(lambda: optimizer.minimize(F.cross_entropy(model(x), y)))


def test_a_write_that_leaves_no_trace_is_found_by_the_desync_check() -> None:
    for told in run_ranks(_through_data, 2):
        assert "rank 1 in memory.queue" in told and "strategy.local_buffers" in told


# --- averaged(), and checkpoints ----------------------------------------------------------------------------------------------


def _shown(rank: int) -> dict[str, Tensor]:
    warnings.simplefilter("ignore", FleetWarning)
    model, optimizer = built(LARGE, {"localsgd": True, "localsgd_configs": {"k_steps": 10, "begin_step": 1}})
    train(model, optimizer, rank, range(3))
    before = model.memory.queue.clone()
    with optimizer.averaged():
        shown = model.memory.queue.clone()
    after = model.memory.queue.clone()
    optimizer.average()
    return {"before": before, "shown": shown, "after": after, "averaged": model.memory.queue.clone()}


def test_averaged_shows_the_mean_of_a_large_buffer_and_gives_each_rank_its_own_back() -> None:
    first, second = run_ranks(_shown, 2)
    mean = (first["before"] + second["before"]) / 2
    for rank in (first, second):
        torch.testing.assert_close(rank["shown"], mean)
        torch.testing.assert_close(rank["after"], rank["before"], rtol=0, atol=0)
        torch.testing.assert_close(rank["averaged"], mean)


def _resumed(rank: int, folder: Path, entries: int, strategy: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    warnings.simplefilter("ignore", FleetWarning)
    states = []
    for resumes in (False, True):
        model, optimizer = built(entries, strategy)
        if resumes:
            assert fleet.load_checkpoint(folder, model=model, optimizer=optimizer) is not None
        else:
            train(model, optimizer, rank, range(5))
            fleet.save_checkpoint(folder, step=5, model=model, optimizer=optimizer)
        train(model, optimizer, rank, range(5, 9))
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states[0], states[1]


@pytest.mark.parametrize("local", [["memory.*"], []], ids=["own", "equal"])
@pytest.mark.parametrize("entries", [SMALL, LARGE])
@pytest.mark.parametrize(
    "strategy",
    [
        {},
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 3, "begin_step": 1}},
        {"localsgd": True, "localsgd_configs": {"k_steps": 3, "begin_step": 1, "overlap_steps": 2}},
    ],
    ids=["plain", "merge", "localsgd", "overlap"],
)
def test_a_resumed_run_continues_to_the_bit(tmp_path: Path, strategy: dict[str, Any], entries: int, local: list[str]) -> None:
    ranks = run_ranks(_resumed, 2, tmp_path, entries, strategy | {"local_buffers": local})
    for through, resumed in ranks:
        torch.testing.assert_close(resumed, through, rtol=0, atol=0)
    assert not local or not torch.equal(ranks[0][1]["memory.queue"], ranks[1][1]["memory.queue"])


def _resumed_otherwise(rank: int, folder: Path) -> str:
    model, optimizer = built(SMALL, {"local_buffers": ["memory.*"]})
    train(model, optimizer, rank, range(2))
    fleet.save_checkpoint(folder, step=2, model=model, optimizer=optimizer)
    model, optimizer = built(SMALL, {"local_buffers": ["memory.filled"]})
    return raised(lambda: fleet.load_checkpoint(folder, model=model, optimizer=optimizer))


def test_a_buffer_that_was_each_ranks_own_is_not_averaged_after_a_resume(tmp_path: Path) -> None:
    for told in run_ranks(_resumed_otherwise, 2, tmp_path):
        assert "buffer `memory.queue` was each rank's own in the run that saved it" in told
