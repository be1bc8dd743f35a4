"""Checkpoints of several ranks: whose is what, one answer on all ranks, other numbers of ranks, and saves in the background."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fleetx import fleet
from fleetx.checkpoint import save as save_module
from fleetx.checkpoint.snapshot import take_share
from fleetx.dist.comm import SoloComm
from fleetx.errors import FleetWarning
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, flat_state, mlp

SHARED = ["MANIFEST.json", "common.json", "common.safetensors"]
TIME_LIMIT_S = 120


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def own_of(*ranks: int) -> list[str]:
    return [f"rank-{rank:05d}.{ending}" for rank in ranks for ending in ("json", "safetensors")]


def files_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The FleetWarnings inside, as text."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FleetWarning)
        yield told
        told += [str(w.message) for w in caught]


# --- whose is what ------------------------------------------------------------------------------------------------------


def _save_mixed(rank: int, folder: str) -> Any:
    seed_all(5)
    common, mine = torch.arange(100_000.0), torch.full((1000,), float(rank))
    path = fleet.save_checkpoint(folder, step=3, tensors={"common": common, "mine": mine}, number=rank * 10, name="x").wait()
    loaded = fleet.load_checkpoint(folder, tensors=None, number=None, name=None)
    assert loaded is not None and path.is_dir()
    found = loaded.values["tensors"]
    return torch.equal(found["common"], common), found["mine"].unique().tolist(), loaded.values["number"], loaded.values["name"]


@pytest.mark.parametrize("size", [2, 4])
def test_what_differs_comes_back_on_its_own_rank_and_what_is_equal_is_written_once(size: int, tmp_path: Path) -> None:
    assert run_ranks(_save_mixed, size, str(tmp_path)) == [(True, [rank], rank * 10, "x") for rank in range(size)]
    path = tmp_path / "step-0000000003"
    assert files_in(path) == SHARED + own_of(*range(size))
    assert 400_000 < (path / "common.safetensors").stat().st_size < 420_000
    for rank in range(size):
        assert 4_000 < (path / f"rank-{rank:05d}.safetensors").stat().st_size < 5_000


def _save_equal(rank: int, folder: str, differing_words: bool) -> Any:
    seed_all(5)
    words = {"rank": rank if differing_words else 0}
    fleet.save_checkpoint(folder, step=1, model=mlp(), words=words)
    model = mlp()
    loaded = fleet.load_checkpoint(folder, model=model, words=None)
    assert loaded is not None
    return loaded.values["words"]["rank"], torch.equal(flat_state(model), flat_state(mlp()))


def test_when_all_is_equal_no_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(_save_equal, 3, str(tmp_path), False) == [(0, True)] * 3
    assert files_in(tmp_path / "step-0000000001") == SHARED


def test_words_may_differ_where_all_tensors_are_equal(tmp_path: Path) -> None:
    assert run_ranks(_save_equal, 2, str(tmp_path), True) == [(0, True), (1, True)]
    assert files_in(tmp_path / "step-0000000001") == SHARED + own_of(0, 1)
    assert (tmp_path / "step-0000000001" / "rank-00001.safetensors").stat().st_size < 100


def _save_on_one_rank(rank: int, folder: str) -> Any:
    seed_all(5)
    extra = {"extra": torch.ones(3)} if rank == 1 else {}
    fleet.save_checkpoint(folder, step=1, number=7, **extra)
    loaded = fleet.load_checkpoint(folder, number=None)
    return None if loaded is None else sorted(loaded.values)


def test_what_one_rank_alone_saves_comes_back_on_that_rank_alone(tmp_path: Path) -> None:
    assert run_ranks(_save_on_one_rank, 2, str(tmp_path)) == [["number"], ["extra", "number"]]
    assert files_in(tmp_path / "step-0000000001") == SHARED + own_of(1)


def _own_random_numbers(rank: int, folder: str) -> Any:
    seed_all(100 + rank)
    fleet.save_checkpoint(folder, step=1, number=1)
    expected = draw()
    seed_all(0)
    fleet.load_checkpoint(folder, number=None)
    return draw() == expected, expected


def test_each_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    ranks = run_ranks(_own_random_numbers, 3, str(tmp_path))
    assert [same for same, _ in ranks] == [True] * 3
    assert len({tuple(numbers) for _, numbers in ranks}) == 3


# --- one answer on all ranks --------------------------------------------------------------------------------------------


class Stubborn:
    """Its state cannot be taken on some ranks, by an error of the user's own."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise ZeroDivisionError("mine")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"a": 1}


def _cannot_be_taken(rank: int, folder: str, what: str) -> str:
    value: Any = {"lambda": (lambda: 0) if rank == 1 else 0, "user": Stubborn(rank == 1)}[what]
    return raised(lambda: fleet.save_checkpoint(folder, step=1, number=1, thing=value))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("lambda", "CheckpointError: rank 1: `thing` is a function, which cannot be saved without pickle"),
        ("user", "CheckpointError: rank 1: `thing` cannot be saved: ZeroDivisionError: mine"),
    ],
)
def test_an_object_that_one_rank_cannot_save_is_an_error_on_all(what: str, message: str, tmp_path: Path) -> None:
    told = run_ranks(_cannot_be_taken, 2, str(tmp_path), what)
    assert told[0] == told[1] and told[0].startswith(message)
    assert os.listdir(tmp_path) == []


CULPRITS = {"without_aliases": 1, "record_of": 1, "Manifest": 0}
"""What fails, and on which rank: the manifest is rank 0's."""


def _cannot_be_written(rank: int, folder: str, where: str, in_background: bool) -> tuple[str, str, Any]:
    original = getattr(save_module, where)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("of this rank")

    if rank == CULPRITS[where]:
        setattr(save_module, where, fail)
    try:
        first = raised(lambda: fleet.save_checkpoint(folder, step=1, async_save=in_background, number=rank).wait())
    finally:
        setattr(save_module, where, original)
    fleet.barrier_worker()
    left = ", ".join(name for name in os.listdir(folder) if name != ".writer")
    fleet.barrier_worker()
    fleet.save_checkpoint(folder, step=2, async_save=in_background, number=rank).wait()
    return first, left, fleet.load_checkpoint(folder, number=None)


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("where", CULPRITS)
def test_any_error_of_one_rank_while_writing_is_an_error_on_all_and_leaves_nothing(
    where: str, in_background: bool, tmp_path: Path
) -> None:
    for rank, (told, left, loaded) in enumerate(run_ranks(_cannot_be_written, 2, str(tmp_path), where, in_background)):
        assert told == f"CheckpointError: rank {CULPRITS[where]} could not write: MemoryError: of this rank"
        assert left == ""
        assert loaded == (2, {"number": rank})
    assert os.listdir(tmp_path) == ["step-0000000002"]


def _different_steps(rank: int, folder: str) -> str:
    return raised(lambda: fleet.save_checkpoint(folder, step=10 + rank, number=1))


def test_ranks_that_count_differently_are_told_so(tmp_path: Path) -> None:
    told = run_ranks(_different_steps, 2, str(tmp_path))
    assert told == ["CheckpointError: the ranks save different steps: [10, 11]. Count updates, on every rank."] * 2
    assert os.listdir(tmp_path) == []


def pair(strategy: fleet.DistributedStrategy | None = None) -> tuple[nn.Module, Any]:
    model = mlp()
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)


def loss_of(model: nn.Module, index: int) -> Tensor:
    x, y = batch(index)
    return F.cross_entropy(model(x), y)


def merging(micro_steps: int) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": micro_steps})


def _save_in_mid_backward(rank: int, folder: str) -> str:
    model, optimizer = pair(merging(2))
    optimizer.backward(loss_of(model, rank))  # no collective yet: the window is open
    if rank == 0:
        optimizer.step()
    return raised(lambda: fleet.save_checkpoint(folder, step=1, model=model, optimizer=optimizer))


def test_a_save_before_the_step_of_a_backward_is_refused_on_all_ranks(tmp_path: Path) -> None:
    told = run_ranks(_save_in_mid_backward, 2, str(tmp_path))
    assert told[0] == told[1]
    assert told[0].startswith("CheckpointError: rank 1: the optimizer holds gradients that step() has not taken yet. Save after")
    assert os.listdir(tmp_path) == []


def _save_two(rank: int, folder: str) -> None:
    for step in (1, 2):
        fleet.save_checkpoint(folder, step=step, number=100 * step + rank)


def _load_number(rank: int, folder: str) -> Any:
    with heard() as told:
        loaded = fleet.load_checkpoint(folder, number=None)
    return (None, None, told) if loaded is None else (loaded.step, loaded.values["number"], told)


def test_a_file_damaged_for_one_rank_makes_all_ranks_fall_back_together(tmp_path: Path) -> None:
    run_ranks(_save_two, 3, str(tmp_path))
    os.truncate(tmp_path / "step-0000000002" / "rank-00001.json", 5)
    ranks = run_ranks(_load_number, 3, str(tmp_path))
    assert [(step, number) for step, number, _ in ranks] == [(1, 100), (1, 101), (1, 102)]
    assert "step-0000000002: rank-00001.json has 5 bytes instead of" in ranks[0][2][0]
    assert ranks[1][2] == ranks[2][2] == []  # rank 0 speaks for all


def test_a_file_damaged_for_one_rank_in_each_checkpoint_is_one_error_on_all(tmp_path: Path) -> None:
    run_ranks(_save_two, 2, str(tmp_path))
    os.truncate(tmp_path / "step-0000000002" / "rank-00001.json", 5)
    os.truncate(tmp_path / "step-0000000001" / "rank-00000.safetensors", 5)
    told = run_ranks(_load_raising, 2, str(tmp_path))
    assert told[0] == told[1] and "is whole" in told[0]
    assert "rank-00001.json has 5 bytes" in told[0] and "rank-00000.safetensors has 5 bytes" in told[0]


def _load_raising(rank: int, folder: str) -> str:
    return raised(lambda: fleet.load_checkpoint(folder, number=None))


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only_here = nn.Linear(2, 2)


def _load_what_does_not_fit(rank: int, folder: str) -> tuple[str, bool]:
    seed_all(rank)
    model, optimizer = pair()
    optimizer.minimize(loss_of(model, rank))
    fleet.save_checkpoint(folder, step=1, model=model, optimizer=optimizer, number=3)
    optimizer.minimize(loss_of(model, rank + 2))
    wrong = {"number": Other()} if rank == 1 else {"number": None}
    before, numbers = [flat_state(model), *momenta(model, optimizer)], torch.get_rng_state()
    told = raised(lambda: fleet.load_checkpoint(folder, model=model, optimizer=optimizer, **wrong))
    after = [flat_state(model), *momenta(model, optimizer)]
    same = all(map(torch.equal, before, after)) and torch.equal(torch.get_rng_state(), numbers)
    return told, same and optimizer.pipeline.index == 2


def momenta(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]


def test_what_does_not_fit_on_one_rank_is_one_error_on_all_and_changes_nothing(tmp_path: Path) -> None:
    for told, unchanged in run_ranks(_load_what_does_not_fit, 2, str(tmp_path)):
        assert told.startswith("CheckpointError: ") and "`number` was saved as a value, and is to be loaded into a model" in told
        assert unchanged


def _load_into_another_pair(rank: int, folder: str, kind: str) -> str:
    model, optimizer = pair()
    optimizer.minimize(loss_of(model, rank))
    fleet.save_checkpoint(folder, step=1, optimizer=optimizer)
    other = Other() if kind == "model" else mlp()
    inner = torch.optim.AdamW(other.parameters(), lr=0.1) if kind == "optimizer" else torch.optim.SGD(other.parameters(), lr=0.1)
    _, fresh = fleet.distribute(other, inner)
    return raised(lambda: fleet.load_checkpoint(folder, optimizer=fresh))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "model",
            "trains other parameters than this one. Only in the checkpoint: 0.bias, 0.weight, 2.bias, 2.weight, ",
        ),
        ("optimizer", "saved by another kind of optimizer than AdamW"),
    ],
)
def test_the_training_state_of_another_pair_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    told = run_ranks(_load_into_another_pair, 2, str(tmp_path), kind)
    assert told[0] == told[1] and message in told[0]


# --- storage that is not shared -----------------------------------------------------------------------------------------


def _in_folders_of_their_own(rank: int, folder: str, holders: list[int]) -> tuple[str, str]:
    """Each rank has a folder of its own; in those of `holders` lies a checkpoint, as another run would have left it."""
    mine = Path(folder) / f"node-{rank}"
    saved = raised(lambda: fleet.save_checkpoint(mine, step=5, number=rank))
    if rank in holders:
        alone = SoloComm()
        share = take_share({"number": rank}, alone, fleet.device(), copies=False)
        save_module.write_checkpoint(share, mine, step=5, keep=1, comm=alone)
    fleet.barrier_worker()
    return saved, raised(lambda: fleet.load_checkpoint(mine, number=None))


@pytest.mark.parametrize(
    ("holders", "message"),
    [
        ([0], "ranks [1] do not see "),
        ([1], "ranks [1] see checkpoints in "),
        ([0, 1], "ranks [1] see another checkpoint at "),
    ],
    ids=["rank 0 has one", "rank 1 has one", "each has another"],
)
def test_ranks_that_do_not_see_one_folder_are_told_so(holders: list[int], message: str, tmp_path: Path) -> None:
    for saved, loaded in run_ranks(_in_folders_of_their_own, 2, str(tmp_path), holders):
        assert saved.startswith("CheckpointError: rank 1 does not see ") and "which rank 0 has just made" in saved
        assert loaded.startswith(f"CheckpointError: {message}") and loaded.endswith("must lie on storage that all nodes share.")
    assert [name for name in os.listdir(tmp_path / "node-0") if name.startswith(".")] == []


def _cannot_list(rank: int, folder: str) -> str:
    return raised(lambda: fleet.load_checkpoint(Path(folder) / f"x{rank}", number=None))


def test_a_directory_that_one_rank_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "x1").write_text("a file")
    told = run_ranks(_cannot_list, 2, str(tmp_path))
    assert told[0] == told[1] and told[0].startswith("CheckpointError: rank 1 cannot read ")


# --- another number of ranks --------------------------------------------------------------------------------------------

ROWS, ROWS_PER_STEP, EPOCH_STEPS = 48, 4, 12
"""A global batch of 4 rows: 4 ranks take one each, 2 ranks two each, one rank all."""


class Run:
    """A run whose updates do not depend on how many ranks share the rows, up to the order of additions."""

    def __init__(self, strategy: fleet.DistributedStrategy | None = None) -> None:
        rows = TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1)))
        self.sampler = fleet.sampler(rows, seed=3)
        self.loader = DataLoader(rows, ROWS_PER_STEP // fleet.worker_num(), sampler=self.sampler)
        self.model, self.optimizer = pair(strategy)
        self.seen: list[list[int]] = []

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler}

    def train(self, steps: int) -> None:
        for number, (index, x) in enumerate(self.loader, 1):
            self.seen.append(index.tolist())
            self.optimizer.minimize(self.model(x).square().mean())
            if number == steps:
                return

    def state(self) -> list[Any]:
        return [flat_state(self.model).tolist(), [m.tolist() for m in momenta(self.model, self.optimizer)], self.seen]


def _first_steps(rank: int, folder: str, own_numbers: bool) -> list[Any]:
    seed_all(9 + rank * own_numbers)
    run = Run()
    run.train(5)
    fleet.save_checkpoint(folder, step=5, **run.objects())
    return run.state()


def _other_steps(rank: int, folder: str, steps: int, allowed: bool) -> list[Any]:
    seed_all(1000 + rank)
    run = Run()
    assert fleet.load_checkpoint(folder, new_world_size=allowed, **run.objects()) == (5, {})
    loaded = run.state()
    numbers = draw()
    run.train(steps)
    return [*loaded[:2], run.seen, numbers]


def _whole_epoch(rank: int) -> list[list[int]]:
    run = Run()
    run.train(EPOCH_STEPS)
    return run.seen


def rows_of_steps(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The rows of each global step, in the order of the sampler."""
    steps = [[rows for rank in step for rows in rank] for step in zip(*ranks, strict=True)]
    return [sorted(step) for step in steps]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1), (1, 2)])
def test_what_is_equal_on_all_ranks_loads_exactly_on_another_number_of_them(before: int, after: int, tmp_path: Path) -> None:
    whole = rows_of_steps(run_ranks(_whole_epoch, before))
    saved = run_ranks(_first_steps, before, str(tmp_path), False)
    resumed = run_ranks(_other_steps, after, str(tmp_path), EPOCH_STEPS - 5, False)
    for rank in resumed:
        assert rank[:2] == saved[0][:2]  # weights and momenta, to the bit
        assert rank[3] == resumed[0][3]  # the random numbers that would have come
    assert rows_of_steps([rank[2] for rank in saved]) + rows_of_steps([rank[2] for rank in resumed]) == whole


def _load_refused(rank: int, folder: str, allowed: bool, micro_steps: int) -> tuple[str, bool]:
    run = Run(merging(micro_steps))
    before = flat_state(run.model)
    told = raised(lambda: fleet.load_checkpoint(folder, new_world_size=allowed, **run.objects()))
    return told, torch.equal(flat_state(run.model), before)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1)])
def test_random_numbers_of_each_rank_refuse_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    run_ranks(_first_steps, before, str(tmp_path), True)
    for told, unchanged in run_ranks(_load_refused, after, str(tmp_path), False, 1):
        assert f"it was saved by {before} ranks, and this run has {after}: each rank's random numbers" in told
        assert told.endswith("load_checkpoint(..., new_world_size=True).")
        assert unchanged


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1)])
def test_if_allowed_each_rank_goes_on_with_its_numbers_and_new_ranks_get_others(before: int, after: int, tmp_path: Path) -> None:
    saved = run_ranks(_first_steps, before, str(tmp_path), True)
    expected = run_ranks(_numbers_after_first_steps, before)
    resumed = run_ranks(_other_steps, after, str(tmp_path), 2, True)
    again = run_ranks(_other_steps, after, str(tmp_path), 2, True)
    assert [rank[:2] for rank in resumed] == [saved[0][:2]] * after
    numbers = [rank[3] for rank in resumed]
    assert numbers[:before] == expected[:after]
    assert len({tuple(row) for row in numbers}) == after
    assert numbers == [rank[3] for rank in again]


def _numbers_after_first_steps(rank: int) -> list[float]:
    seed_all(9 + rank)
    run = Run()
    run.train(5)
    return draw()


def _save_in_mid_window(rank: int, folder: str) -> None:
    seed_all(9)
    run = Run(merging(3))
    run.train(4)
    fleet.save_checkpoint(folder, step=4, **run.objects())


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("allowed", [False, True])
def test_an_open_merge_window_refuses_another_number_of_ranks(before: int, after: int, allowed: bool, tmp_path: Path) -> None:
    run_ranks(_save_in_mid_window, before, str(tmp_path))
    for told, unchanged in run_ranks(_load_refused, after, str(tmp_path), allowed, 3):
        assert f"it was saved by {before} ranks, and this run has {after}. These differ between ranks" in told
        assert "optimizer (optimizer/window/gradients/" in told and "(after optimizer.flush())" in told
        assert unchanged


@pytest.mark.parametrize("size", [1, 3])
def test_what_one_rank_alone_saved_is_not_lost_silently_on_another_number_of_ranks(size: int, tmp_path: Path) -> None:
    run_ranks(_save_on_one_rank, 2, str(tmp_path))
    for told in run_ranks(_load_raising, size, str(tmp_path)):
        assert f"saved by 2 ranks, and this run has {size}" in told and "cannot be redistributed" in told


# --- the names of parameters --------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Parameters of one shape: mixed up, nothing but the numbers would tell. Those after c do not train."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.register_parameter(name, nn.Parameter(torch.full((3,), float(ord(name))), requires_grad=name <= "c"))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.a + x.square() * self.b - x.pow(3) * self.c).sum()


def _in_another_order(rank: int, folder: str, order: str, steps: range, load: bool) -> dict[str, list[float]]:
    model = Wide(order)
    model, optimizer = fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    if load:
        fleet.load_checkpoint(folder, model=model, optimizer=optimizer)
    for step in steps:
        optimizer.minimize(model(torch.linspace(-1, 1, 3) + step + rank))
    if not load:
        fleet.save_checkpoint(folder, step=len(steps), model=model, optimizer=optimizer)
    return {name: param.tolist() for name, param in sorted(model.named_parameters())}


@pytest.mark.parametrize(("before", "after"), [("abc", "cab"), ("abcd", "dcab"), ("abcde", "edcab")])
def test_parameters_registered_in_another_order_find_their_state_by_name(before: str, after: str, tmp_path: Path) -> None:
    whole = run_ranks(_in_another_order, 2, str(tmp_path / "whole"), before, range(6), False)
    run_ranks(_in_another_order, 2, str(tmp_path), before, range(3), False)
    resumed = run_ranks(_in_another_order, 2, str(tmp_path), after, range(3, 6), True)
    assert resumed == whole


# --- in the background --------------------------------------------------------------------------------------------------


def _train_while_it_is_written(rank: int, folder: str) -> Any:
    model, optimizer = pair()
    optimizer.minimize(loss_of(model, rank))
    value, weights = {"list": [1], "tensor": torch.ones(200_000)}, flat_state(model)
    saving = fleet.save_checkpoint(folder, step=1, async_save=True, model=model, optimizer=optimizer, value=value)
    value["list"].append(2)  # type: ignore[attr-defined]
    value["tensor"].zero_()  # type: ignore[attr-defined]
    for index in range(20):
        optimizer.minimize(loss_of(model, rank + index))
    assert saving.wait() == Path(folder) / "step-0000000001" and saving.done
    assert not torch.equal(flat_state(model), weights)
    loaded = fleet.load_checkpoint(folder, model=model, optimizer=optimizer, value=None)
    assert loaded is not None
    found = loaded.values["value"]
    return found["list"], float(found["tensor"].min()), torch.equal(flat_state(model), weights)


def test_training_on_does_not_change_what_is_saved(tmp_path: Path) -> None:
    assert run_ranks(_train_while_it_is_written, 2, str(tmp_path)) == [([1], 1.0, True)] * 2


def _two_at_once(rank: int, folder: str) -> Any:
    savings = [fleet.save_checkpoint(folder, step=step, async_save=True, keep=2, number=step) for step in (1, 2, 3)]
    assert savings[0].done and savings[1].done  # a save waits for the one before
    loaded = fleet.load_checkpoint(folder, number=None)  # and so does a load
    assert savings[2].done
    return loaded, [saving.wait().name for saving in savings]


def test_saves_in_the_background_come_one_after_the_other(tmp_path: Path) -> None:
    names = [f"step-{step:010d}" for step in (1, 2, 3)]
    assert run_ranks(_two_at_once, 2, str(tmp_path)) == [((3, {"number": 3}), names)] * 2
    assert sorted(os.listdir(tmp_path)) == names[1:]


def _error_heard_by(rank: int, folder: str, listener: int | None, then: str) -> tuple[str, str, str]:
    """A save in the background fails. One rank, all or none asks how it went, and then comes the next call."""
    original = save_module._prepare
    save_module._prepare = _no_room
    saving = fleet.save_checkpoint(folder, step=1, async_save=True, number=1)
    asked = raised(saving.wait) if listener in (rank, -1) else "not asked"
    if listener is None or listener not in (rank, -1):
        saving._thread.join()  # type: ignore[union-attr]
    save_module._prepare = original
    call = {
        "save": lambda: fleet.save_checkpoint(folder, step=2, number=2),
        "async": lambda: fleet.save_checkpoint(folder, step=2, async_save=True, number=2).wait(),
        "load": lambda: fleet.load_checkpoint(folder, number=None),
    }[then]
    first = raised(call)
    return asked, first, raised(call)


def _no_room(*_: Any) -> str:
    raise OSError(28, "No space left on device")


FULL = "CheckpointError: rank 0 could not write: [Errno 28] No space left on device"


@pytest.mark.parametrize("then", ["save", "async", "load"])
def test_the_error_of_a_save_in_the_background_comes_with_the_next_call_on_all_ranks(then: str, tmp_path: Path) -> None:
    assert run_ranks(_error_heard_by, 2, str(tmp_path), None, then) == [("not asked", FULL, "nothing raised")] * 2


def test_an_error_that_all_ranks_have_heard_does_not_come_again(tmp_path: Path) -> None:
    assert run_ranks(_error_heard_by, 2, str(tmp_path), -1, "save") == [(FULL, "nothing raised", "nothing raised")] * 2


@pytest.mark.parametrize("listener", [0, 1])
def test_an_error_that_only_one_rank_has_heard_comes_again_on_all(listener: int, tmp_path: Path) -> None:
    """That rank would otherwise begin the next save while the other raises, and wait for ever."""
    ranks = run_ranks(_error_heard_by, 2, str(tmp_path), listener, "save")
    assert [asked for asked, _, _ in ranks] == [FULL if rank == listener else "not asked" for rank in range(2)]
    assert [rest for _, *rest in ranks] == [[FULL, "nothing raised"]] * 2


def _waits_twice(rank: int, folder: str) -> tuple[str, str]:
    original, save_module._prepare = save_module._prepare, _no_room
    saving = fleet.save_checkpoint(folder, step=1, async_save=True, number=1)
    told = raised(saving.wait), raised(saving.wait)
    save_module._prepare = original
    return told


def test_a_second_wait_says_that_the_error_was_told(tmp_path: Path) -> None:
    again = "CheckpointError: this checkpoint could not be written; the error was raised before."
    assert run_ranks(_waits_twice, 2, str(tmp_path)) == [(FULL, again)] * 2


# --- the end of a script ------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from fleetx import fleet
from fleetx.checkpoint import save
fleet.init()
rank = fleet.worker_index()
{body}
"""


def run_script(body: str, folder: Path, size: int = 2) -> list[tuple[int, str]]:
    """Exit code and standard error of each rank of a real script, started as torchrun would."""
    path = folder / "script.py"
    path.write_text(SCRIPT.format(body=textwrap.dedent(body)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    common |= {"FLEETX_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(path), str(folder / "runs")],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [(process.returncode, text) for process in started for _, text in [process.communicate(timeout=TIME_LIMIT_S)]]
    finally:
        for process in started:
            process.kill()


def _load_big(rank: int, folder: str) -> Any:
    loaded = fleet.load_checkpoint(folder, big=None)
    return None if loaded is None else (loaded.step, loaded.values["big"].unique().tolist(), loaded.values["big"].numel())


def test_a_script_that_ends_right_after_a_save_in_the_background_leaves_it_complete(tmp_path: Path) -> None:
    ended = run_script(
        "fleet.save_checkpoint(sys.argv[1], step=1, async_save=True, big=torch.full((5_000_000,), float(rank)))", tmp_path
    )
    assert ended == [(0, ""), (0, "")]
    assert run_ranks(_load_big, 2, str(tmp_path / "runs")) == [(1, [0.0], 5_000_000), (1, [1.0], 5_000_000)]


def test_a_script_that_closes_the_process_group_does_not_cut_a_save_short(tmp_path: Path) -> None:
    ended = run_script(
        """
        fleet.save_checkpoint(sys.argv[1], step=1, async_save=True, big=torch.full((5_000_000,), float(rank)))
        dist.destroy_process_group()
        """,
        tmp_path,
    )
    assert ended == [(0, ""), (0, "")]
    assert run_ranks(_load_big, 2, str(tmp_path / "runs")) == [(1, [0.0], 5_000_000), (1, [1.0], 5_000_000)]


def test_a_script_that_fails_right_after_a_save_in_the_background_leaves_it_complete(tmp_path: Path) -> None:
    ended = run_script(
        """
        fleet.save_checkpoint(sys.argv[1], step=1, async_save=True, big=torch.full((5_000_000,), float(rank)))
        raise SystemExit(3)
        """,
        tmp_path,
    )
    assert ended == [(3, ""), (3, "")]
    assert run_ranks(_load_big, 2, str(tmp_path / "runs")) == [(1, [0.0], 5_000_000), (1, [1.0], 5_000_000)]


def test_a_script_that_ends_before_it_hears_of_an_error_says_it_at_the_end(tmp_path: Path) -> None:
    ended = run_script(
        """
        def full(*_): raise OSError(28, "No space left on device")
        save._prepare = full
        fleet.save_checkpoint(sys.argv[1], step=1, async_save=True, number=1)
        """,
        tmp_path,
    )
    for code, text in ended:
        assert code == 0
        assert text == "fleetx: the last checkpoint was not saved: rank 0 could not write: [Errno 28] No space left on device\n"
