"""How a rank describes the loaders it reads: those that shuffle all of the data, by a fingerprint of what they draw from."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fleetx.engine.checks.first_batch import Opaque, advice_on, fingerprint, shuffled_loaders

DATA = TensorDataset(torch.arange(40.0))


class Files(Dataset[str]):
    def __init__(self, files: list[str]) -> None:
        self.files, self.transform = files, str.upper

    def __getitem__(self, index: int) -> str:
        return self.transform(self.files[index])

    def __len__(self) -> int:
        return len(self.files)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


class Hidden:
    """Keeps its samples where no look can get, such as a table of another library's."""

    __slots__ = ()

    def __len__(self) -> int:
        return 40


class Wrapping(Files):
    def __init__(self, table: object) -> None:
        super().__init__([])
        self.table = table

    def __len__(self) -> int:
        return 40


def read_by(loader: DataLoader[Any], *, batches: int = 1) -> list[str]:
    """List the samplers that are described while a loop is at that batch."""
    gc.collect()  # iterators that other tests have left
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return [loader["sampler"] for loader in shuffled_loaders(2)]


def test_a_loader_that_shuffles_all_of_the_data_is_described_while_it_is_read() -> None:
    assert read_by(DataLoader(DATA, 4, shuffle=True)) == ["RandomSampler"]
    assert read_by(DataLoader(DATA, None, shuffle=True)) == ["RandomSampler"]
    assert read_by(DataLoader(DATA, 4, shuffle=True), batches=0) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_loader_with_workers_is_described_until_it_is_exhausted() -> None:
    loader = DataLoader(DATA, 4, shuffle=True, num_workers=1, persistent_workers=True)
    assert read_by(loader) == ["RandomSampler"]
    assert read_by(loader, batches=10) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_loader_with_workers_is_described_at_its_only_batch_and_not_once_its_loop_is_over() -> None:
    gc.collect()
    iterator = iter(DataLoader(DATA, 40, shuffle=True, num_workers=1))
    next(iterator)
    assert [loader["sampler"] for loader in shuffled_loaders(2)] == ["RandomSampler"]
    assert next(iterator, None) is None
    assert shuffled_loaders(2) == []


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(DATA),
        DistributedSampler(DATA, num_replicas=2, rank=0),
        RandomSampler(DATA, num_samples=20),
        WeightedRandomSampler(torch.ones(40), 20),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_shares_out_or_draws_a_part_only_is_not(sampler: Any) -> None:
    assert read_by(DataLoader(DATA, 4, sampler=sampler)) == []


def test_samplers_that_draw_from_all_without_a_share_are() -> None:
    assert read_by(DataLoader(DATA, 4, sampler=WeightedRandomSampler(torch.ones(40), 40))) == ["WeightedRandomSampler"]
    assert read_by(DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(20)))) == ["SubsetRandomSampler"]


def test_a_stream_has_no_sampler_to_describe() -> None:
    assert read_by(DataLoader(Stream(), 4)) == []


def test_a_dataset_that_raises_when_it_is_looked_at_ends_nothing() -> None:
    class Touchy(Files):
        @property
        def _fingerprint(self) -> str:
            raise RuntimeError("closed")

    assert read_by(DataLoader(Touchy(["a"] * 8), 4, shuffle=True)) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TensorDataset(torch.arange(8)), TensorDataset(torch.arange(8, 16))),
        (Files([f"{n}.png" for n in range(8)]), Files([f"{n}.png" for n in range(8, 16)])),
        (Subset(DATA, range(0, 40, 2)), Subset(DATA, range(1, 40, 2))),
        (Subset(DATA, [1, 2, 3]), Subset(DATA, [4, 5, 6])),
        (ConcatDataset([Files(["a", "b"])]), ConcatDataset([Files(["a", "c"])])),
        (Wrapping(np.zeros((40, 8))), Wrapping(np.ones((40, 8)))),
        (Wrapping({"rows": [(1, "a")]}), Wrapping({"rows": [(2, "a")]})),
        (Wrapping(b"first half"), Wrapping(b"second half")),
        ([1, 2, 3], [1, 2, 4]),
        (torch.zeros(40, 28, 28), torch.zeros(40, 28, 28).index_fill(1, torch.tensor([14]), 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_shards_of_equal_length_have_different_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)


def test_the_same_data_loaded_twice_has_one_fingerprint() -> None:
    assert fingerprint(Files(["a", "b"])) == fingerprint(Files(["a", "b"]))
    assert fingerprint(Wrapping(np.arange(40))) == fingerprint(Wrapping(np.arange(40)))


def test_a_dataset_that_cannot_be_looked_into_has_none() -> None:
    with pytest.raises(Opaque):
        fingerprint(Wrapping(Hidden()))
    assert read_by(DataLoader(Wrapping(Hidden()), 4, sampler=RandomSampler(DATA)), batches=0) == []


def test_a_dataset_that_holds_itself_is_looked_at_for_a_moment_only() -> None:
    knot = Files(["a"])
    knot.knots = [[knot] * 50 for _ in range(50)]  # type: ignore[attr-defined]
    with pytest.raises(Opaque):
        fingerprint(knot)


def test_draws_with_replacement_beyond_the_data_are_no_epoch() -> None:
    assert read_by(DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True, num_samples=1000))) == []
    assert read_by(DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True, num_samples=40))) == ["RandomSampler"]


def described(data: str, order: str, sampler: str = "RandomSampler") -> dict[str, Any]:
    return {"data": [sampler, "", data], "order": order, "samples": 40, "sampler": sampler}


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ([[described("x", "1")], [described("x", "2")]], "sampler=fleet.sampler(data))."),
        ([[described("x", "1"), described("y", "1")], [described("y", "2")]], "sampler=fleet.sampler(data))."),
        (
            [[described("x", "1", "WeightedRandomSampler")], [described("x", "2", "WeightedRandomSampler")]],
            "num_samples // fleet.",
        ),
        (
            [[described("x", "1", "SubsetRandomSampler")], [described("x", "2", "SubsetRandomSampler")]],
            "fleet.sampler(len(indices))",
        ),
    ],
)
def test_ranks_that_shuffle_the_same_data_in_their_own_orders_get_the_line_to_write(ranks: Any, line: str) -> None:
    advice = advice_on(ranks)
    assert advice is not None
    assert advice.startswith("each of the 2 ranks shuffles all 40 samples by itself")
    assert line in advice


@pytest.mark.parametrize(
    "ranks",
    [
        [[], []],
        [[described("x", "1")], []],
        [[described("x", "1")], [described("y", "2")]],  # shards that the script has made
        [[described("x", "1")], [described("x", "1")]],  # one order on all ranks: the script shares the batches out itself
    ],
)
def test_other_ranks_are_not(ranks: Any) -> None:
    assert advice_on(ranks) is None
