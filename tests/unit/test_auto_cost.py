"""The cost of an update, by numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetx.auto.cost import Gradients, Measures, Reducer, compared, statistical_efficiency, update_cost
from fleetx.errors import ConfigError
from fleetx.wire_cost import Link

GRADIENTS = Gradients(numel=1_000_000, large=900_000, matrices=((1000, 500), (500, 200)))
MEASURES = Measures(samples=8, forward_s=0.010, backward_s=0.020, update_s=0.002, gradients=GRADIENTS)
FAST, SLOW = Link(2, 1e9), Link(2, 1e7)
"""Two ranks: a ring all-reduce of 4 MB sends 4 MB, in 4 ms and in 400."""


def test_what_is_shorter_than_backward_is_hidden() -> None:
    cost = update_cost(MEASURES, FAST)
    assert cost.seconds == pytest.approx(0.032) and cost.shown_s == 0 and cost.wire_s == pytest.approx(0.004)
    assert cost.bytes_sent == 4_000_000 and cost.samples == 16 and cost.samples_per_s == pytest.approx(16 / 0.032)


def test_what_is_longer_shows() -> None:
    cost = update_cost(MEASURES, SLOW)
    assert cost.shown_s == pytest.approx(0.380) and cost.seconds == pytest.approx(0.412)
    assert update_cost(replace(MEASURES, hidden_share=0.5), SLOW).shown_s == pytest.approx(0.390)


def test_merging_pays_the_wire_once_and_16_bits_half_of_it() -> None:
    assert update_cost(MEASURES, SLOW, merge_steps=4).seconds == pytest.approx(4 * 0.030 + 0.380 + 0.002)
    assert update_cost(MEASURES, SLOW, merge_steps=4).samples == 64
    assert update_cost(MEASURES, SLOW, Reducer("16 bits")).shown_s == pytest.approx(0.180)


def test_computing_again_costs_time_and_hides_as_much_of_the_wire() -> None:
    assert update_cost(MEASURES, FAST, again_s=0.005).seconds == pytest.approx(0.037)
    assert update_cost(MEASURES, SLOW, again_s=0.005).seconds == pytest.approx(0.412)


def test_compressors_are_not_hidden_and_cost_work() -> None:
    sparse = update_cost(MEASURES, SLOW, Reducer("dgc", 0.999, work_s=0.003))
    assert sparse.bytes_sent == pytest.approx(400_000 + 900 * 8)  # 100,000 dense numbers, 900 entries
    assert sparse.seconds == pytest.approx(0.032 + 0.003 + 0.040_72)
    factors = update_cost(MEASURES, SLOW, Reducer("powersgd", 4, work_s=0.001))
    assert factors.bytes_sent == pytest.approx(4 * (4 * (1000 + 500) + 4 * (500 + 200) + 400_000))
    assert factors.shown_s == factors.wire_s


def test_local_sgd_shares_one_averaging_among_its_period() -> None:
    cost = update_cost(MEASURES, SLOW, Reducer("localsgd", 8))
    assert cost.bytes_sent == 500_000 and cost.seconds == pytest.approx(0.032 + 0.050)


def test_one_rank_sends_nothing() -> None:
    for reducer in (Reducer(), Reducer("16 bits"), Reducer("dgc", 0.99), Reducer("powersgd", 2), Reducer("localsgd", 4)):
        cost = update_cost(MEASURES, Link(1, 1e9), reducer)
        assert cost.bytes_sent == 0 and cost.seconds == pytest.approx(0.032)


def test_a_sparse_gather_grows_with_the_ranks_and_a_dense_ring_does_not() -> None:
    few, many = Link(8, 1e8), Link(4096, 1e8)
    reducer = Reducer("dgc", 0.999)
    assert update_cost(MEASURES, few, reducer).bytes_sent < update_cost(MEASURES, few).bytes_sent
    assert update_cost(MEASURES, many, reducer).bytes_sent > update_cost(MEASURES, many).bytes_sent


def test_half_of_what_a_sample_teaches_is_left_where_the_batch_is_the_noise_scale() -> None:
    assert statistical_efficiency(1000, 1000) == 0.5 and statistical_efficiency(0, 10) == 1.0


def test_a_sentence_has_the_numbers_of_both_sides() -> None:
    dgc = Reducer("dgc", 0.999, work_s=0.0094)
    assert compared(MEASURES, SLOW, dgc) == (
        "dgc: saves 339.3 ms of waiting for the wire, costs 9.4 ms of its own; it pays here."
    )
    assert compared(MEASURES, FAST, dgc) == (
        "dgc: waits 0.4 ms longer for the wire, costs 9.4 ms of its own; it does not pay here."
    )


def test_an_unknown_reducer_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'ring' is not known; there are dense, 16 bits, dgc, powersgd, localsgd"):
        Reducer("ring")
