"""Lines through measured times, and times read off between them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fleetx.auto.link import SIZES, LinkProfile, fitted, measured_link, read_off
from fleetx.dist import world
from fleetx.dist.predicted_cost import all_reduce
from tests.helpers.harness import run_ranks

LATENCY, RATE = 50e-6, 1e9


def points(noise: float = 0.0) -> list[tuple[float, float]]:
    draw = random.Random(3)
    return [(float(size), (LATENCY + size / RATE) * (1 + noise * draw.uniform(-1, 1))) for size in SIZES]


def test_there_are_eight_sizes_from_4_kib_to_64_mib() -> None:
    assert len(SIZES) == 8 and SIZES[0] == 4096 and SIZES[-1] == 64 * 2**20


def test_a_line_is_found_again() -> None:
    line = fitted(points())
    assert line.latency_s == pytest.approx(LATENCY, rel=1e-6) and line.bytes_per_s == pytest.approx(RATE, rel=1e-6)


def test_it_is_the_line_of_numpys_weighted_least_squares() -> None:
    found = points(0.2)
    sizes, seconds = np.array(found).T
    slope, latency = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    line = fitted(found)
    assert line.latency_s == pytest.approx(latency, rel=1e-6) and 1 / line.bytes_per_s == pytest.approx(slope, rel=1e-6)


def test_noise_of_a_fifth_moves_neither_by_more_than_a_third() -> None:
    line = fitted(points(0.2))
    assert line.latency_s == pytest.approx(LATENCY, rel=0.33) and line.bytes_per_s == pytest.approx(RATE, rel=0.33)


def test_latency_and_rate_are_never_negative() -> None:
    falling = fitted([(1e3, 2.0), (1e6, 1.0)])
    assert falling.latency_s == 0 and falling.bytes_per_s == 1e6
    curved = fitted([(1.0, 0.5), (2.0, 2.0), (3.0, 4.5)])
    assert curved.latency_s == 0 and curved.bytes_per_s > 0


def test_between_two_sizes_the_time_is_between_theirs_and_beyond_the_largest_it_grows_by_the_rate() -> None:
    found = [(100.0, 1.0), (200.0, 3.0), (400.0, 4.0)]
    assert read_off(found, 150.0) == 2.0 and read_off(found, 300.0) == 3.5 and read_off(found, 200.0) == 3.0
    assert read_off(found, 10.0) == 1.0
    assert read_off(found, 500.0) == pytest.approx(4.0 + 100 / fitted(found).bytes_per_s)


def test_the_link_predicts_the_all_reduce_that_it_was_fitted_to() -> None:
    profile = LinkProfile(4, tuple(points()), tuple(points()))
    assert all_reduce(1e6, profile.link()).seconds == pytest.approx(LATENCY + 1e6 / RATE, rel=1e-6)


def test_one_rank_has_no_network(alone: None) -> None:
    profile = measured_link(world.current().comm, torch.device("cpu"))
    assert profile.all_reduce_s(1e6) == 0.0 and all_reduce(1e6, profile.link()).seconds == 0.0


def _measured(rank: int, longest: float) -> LinkProfile:
    return measured_link(world.current().comm, torch.device("cpu"), sizes=SIZES[:6], longest_s=longest)


def test_all_ranks_have_the_same_measures_and_more_bytes_take_longer() -> None:
    longer = []
    for _ in range(5):  # what else a machine does may make the small ones slow for a moment
        first, second, third = run_ranks(_measured, 3, 60.0)
        assert first == second == third and len(first.all_reduce) == len(first.all_gather) == 6
        assert first.all_reduce_s(2**12) > 0 and first.link().ranks == 3 and first.link().bytes_per_s > 0
        longer.append(first.all_reduce_s(4 * 2**20) > first.all_reduce_s(2**12))
        if longer[-1]:
            break
    assert longer[-1]


def test_on_a_slow_link_the_largest_sizes_are_left_out_by_all_ranks() -> None:
    first, second = run_ranks(_measured, 2, 0.0)
    assert first == second and len(first.all_reduce) == len(first.all_gather) == 3
