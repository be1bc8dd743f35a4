"""What reducers send, against numbers worked out by hand, and against what the byte counter counts."""

from __future__ import annotations

import pytest

from fleetx import fleet
from fleetx.dist.predicted_cost import (
    Cost,
    Link,
    all_gather,
    all_reduce,
    averaging,
    break_even_ranks,
    dense,
    low_rank,
    low_rank_times_less,
    quantised,
    sparse,
    times_less,
)


def test_a_ring_sends_nearly_twice_the_data_and_a_gather_as_often_as_there_are_others() -> None:
    link = Link(ranks=4, bytes_per_s=100.0, latency_s=0.5)
    assert all_reduce(800.0, link) == Cost(bytes_sent=1200.0, seconds=6 * 0.5 + 12.0)
    assert all_gather(800.0, link) == Cost(bytes_sent=2400.0, seconds=3 * 0.5 + 24.0)


def test_one_rank_sends_nothing() -> None:
    link = Link(ranks=1, bytes_per_s=1.0, latency_s=1.0)
    assert all_reduce(800.0, link) == all_gather(800.0, link) == Cost(0.0, 0.0)


def test_16_bits_halve_a_dense_reduce_and_a_period_divides_it() -> None:
    link = Link(ranks=2, bytes_per_s=1000.0)
    assert dense(500, link) == Cost(2000.0, 2.0)
    assert dense(500, link, item_bytes=2) == Cost(1000.0, 1.0)
    assert averaging(500, link, period=4) == Cost(500.0, 0.5)


def test_dgc_sends_eight_bytes_for_each_entry_to_every_other_rank() -> None:
    cost = sparse(10_000, Link(ranks=3, bytes_per_s=1000.0), sparsity=0.99, dense_numel=30)
    assert cost.bytes_sent == pytest.approx(2 * 100 * 8 + 2 * 2 / 3 * 30 * 4)


def test_powersgd_sends_both_factors_whatever_the_ranks_and_no_more_columns_than_there_are() -> None:
    link = Link(ranks=2, bytes_per_s=1000.0, latency_s=0.1)
    cost = low_rank([(10, 20), (3, 100)], link, rank=4, dense_numel=5)
    assert cost.bytes_sent == (4 * 30 + 3 * 103 + 5) * 4
    assert cost.seconds == pytest.approx(4 * 0.1 + cost.bytes_sent / 1000)
    assert low_rank_times_less(1024, 1024, 4) == 128.0


def test_integers_are_sent_both_ways_in_whole_blocks_with_two_bytes_for_each() -> None:
    cost = quantised(1000, Link(ranks=2, bytes_per_s=1.0), bits=4, block=128, dense_numel=7)
    assert cost.bytes_sent == 2 * 1 / 2 * (8 * (128 / 2 + 2) + 7 * 4)


@pytest.mark.parametrize(("sparsity", "ranks"), [(0.999, 1000), (0.99, 100), (0.75, 4)])
def test_a_sparse_gather_stops_paying_at_one_over_density(sparsity: float, ranks: int) -> None:
    assert break_even_ranks(sparsity) == pytest.approx(ranks)
    link = Link(ranks=ranks, bytes_per_s=1.0)
    assert sparse(10**6, link, sparsity=sparsity).bytes_sent == pytest.approx(dense(10**6, link).bytes_sent)
    assert times_less(sparsity, 2) == pytest.approx(ranks / 2)
    assert break_even_ranks(sparsity, item_bytes=2) == pytest.approx(ranks / 2)


def test_explain_says_from_how_many_ranks_on_dgc_does_not_pay() -> None:
    told = fleet.DistributedStrategy(dgc=True, dgc_configs={"sparsity": [0.75, 0.99]}).explain()
    assert "50 times less among 2, 12.5 times less among 8, 3.12 times less among 32" in told
    assert "Beyond 100 ranks (1 / density) it sends more." in told
    assert "its first sparse updates, at 0.75, send more than dense ones beyond 4 ranks." in told
    nodes = fleet.DistributedStrategy(dgc=True, dgc_configs={"two_level": True}).explain()
    assert "Beyond 1,000 nodes" in nodes


def test_explain_says_what_factors_save() -> None:
    told = fleet.DistributedStrategy(powersgd=True, powersgd_configs={"rank": 2}).explain()
    assert "factors of rank 2" in told and "256 times less of 1024 x 1024" in told
