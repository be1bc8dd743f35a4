"""The largest entries, exactly: against a stable sort, on rows that are hard to choose from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fleetx.reduce import top_k
from fleetx.reduce.top_k import largest
from tests.helpers.compression_reference import Array, largest_places


def random_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_chooses(row: Array, count: int) -> None:
    before = row.copy()
    places = largest(torch.from_numpy(row), count)
    assert places.dtype == torch.int64 and places.shape == (count,)
    np.testing.assert_array_equal(places.numpy(), largest_places(row, count))
    np.testing.assert_array_equal(row, before)


def test_three_of_eight_worked_out_by_head() -> None:
    row = torch.tensor([1.0, -3.0, 2.0, 3.0, -2.0, 0.0, 2.0, -0.0])
    assert largest(row, 1).tolist() == [1]
    assert largest(row, 2).tolist() == [1, 3]
    assert largest(row, 4).tolist() == [1, 2, 3, 4]
    assert largest(row, 7).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert largest(row, 8).tolist() == list(range(8))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numel", [1, 2, 3, 17, 1000, 16_383, 16_384, 49_999, 65_537, 131_073, 300_000])
def test_every_size_and_count_as_a_stable_sort_has_it(numel: int, dtype: type) -> None:
    row = random_of(numel).normal(size=numel).astype(dtype)
    for count in sorted({1, max(1, numel // 1000), max(1, numel // 10), max(1, numel - 1), numel}):
        assert_chooses(row, count)


def few_values(numel: int) -> Array:
    return random_of(1).integers(-3, 4, size=numel).astype(np.float32)


def heavy_tail(numel: int) -> Array:
    return (random_of(2).standard_cauchy(size=numel) ** 3).astype(np.float32)


def one_peak(numel: int) -> Array:
    row = np.zeros(numel, np.float32)
    row[numel // 3] = -1e-30
    return row


def zeros_and_a_few(numel: int) -> Array:
    row = np.zeros(numel, np.float32)
    row[random_of(3).choice(numel, size=numel // 2000, replace=False)] = 1.0
    return row


def first_half_large(numel: int) -> Array:
    row = random_of(4).normal(size=numel).astype(np.float32)
    row[: numel // 2] *= 1000.0
    return row


def subnormal(numel: int) -> Array:
    return (random_of(5).integers(0, 50, size=numel) * np.float32(1e-45)).astype(np.float32)


def signed_zeros(numel: int) -> Array:
    return np.where(random_of(6).random(numel) < 0.5, np.float32(-0.0), np.float32(0.0))


def ends_of_the_range(numel: int) -> Array:
    row = random_of(7).normal(size=numel).astype(np.float32)
    row[[5, numel // 2, numel - 1]] = [3.4e38, -3.4e38, 3.4e38]
    row[numel // 4 : numel // 4 + 9] = np.inf
    return row


HARD: list[Callable[[int], Array]] = [
    few_values, heavy_tail, one_peak, zeros_and_a_few, first_half_large, subnormal, signed_zeros, ends_of_the_range
]  # fmt: skip


@pytest.mark.parametrize("make", HARD)
def test_rows_that_are_hard_to_choose_from(make: Callable[[int], Array]) -> None:
    for numel in (5_000, 200_000):
        row = make(numel)
        for count in (1, 7, numel // 1000, numel // 20, numel // 2):
            assert_chooses(row, count)
            assert_chooses(row.astype(np.float64), count)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-40])
def test_of_equal_entries_the_first(value: float) -> None:
    for numel, count in ((10, 3), (150_000, 1), (150_000, 149), (150_000, 75_000)):
        row = np.full(numel, value, np.float32)
        assert largest(torch.from_numpy(row), count).tolist() == list(range(count))


@pytest.mark.parametrize("sampled_are", ["smallest", "largest", "equal", "just short"])
@pytest.mark.parametrize("period", [3, 5, 8, 11, 23])
def test_a_row_that_repeats_in_step_with_any_sample_is_chosen_from_exactly(period: int, sampled_are: str) -> None:
    """Every `period`-th entry is unlike all others: a sample in step with it sees those alone, or none of them."""
    numel = 16_384 * period + 5
    row = 1.0 + random_of(period).random(numel, dtype=np.float32)
    at = slice(0, None, period)
    if sampled_are == "smallest":
        row[at] *= 1e-3
    elif sampled_are == "largest":
        row[at] *= 1e3
    elif sampled_are == "equal":
        row[at] = 2.0
    else:
        row[at] = 1.0
        row[1::period] = 1.0 + np.float32(2**-20)
    for count in (1, numel // 1000, numel // period, numel // period + 1):
        assert_chooses(row, count)


def test_a_bound_that_is_too_high_or_too_low_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sample says, the answer is the same."""
    row = random_of(8).normal(size=200_000).astype(np.float32)
    wanted = largest_places(row, 200)
    for bound in (0.0, 1e-30, 1.0, float(np.sort(np.abs(row))[-200]), float(np.abs(row).max()), 1e30):
        monkeypatch.setattr(top_k, "likely_bound", lambda row, count, bound=bound: bound)
        np.testing.assert_array_equal(largest(torch.from_numpy(row), 200).numpy(), wanted)


@pytest.mark.parametrize("way", [top_k.largest_by_sorting, top_k.largest_by_key])
@pytest.mark.parametrize("make", HARD)
def test_the_ways_taken_on_other_devices_choose_the_same(
    way: Callable[[Tensor, int], Tensor], make: Callable[[int], Array]
) -> None:
    row = make(20_000)
    for count in (1, 20, 10_000):
        np.testing.assert_array_equal(way(torch.from_numpy(row), count).numpy(), largest_places(row, count))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_rows_are_chosen_from_by_the_same_rule(dtype: torch.dtype) -> None:
    row = torch.from_numpy(random_of(9).normal(size=30_000)).to(dtype)
    for count in (1, 30, 3_000):
        np.testing.assert_array_equal(largest(row, count).numpy(), largest_places(row.float().numpy(), count))


def test_a_row_inside_a_larger_one_is_left_alone() -> None:
    whole = torch.from_numpy(random_of(10).normal(size=200_000).astype(np.float32))
    part = whole[1001:151_001]
    np.testing.assert_array_equal(largest(part, 150).numpy(), largest_places(part.numpy(), 150))
