"""The cost of an update, by numbers that can be checked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx.auto.cost import (
    Exchange,
    Gradients,
    Micro,
    Reducer,
    Rung,
    UpdateCost,
    hidden_share,
    rung_for,
    statistical_efficiency,
    update_cost,
    wire,
)
from fleetx.dist.predicted_cost import Link
from fleetx.errors import ConfigError

GRADIENTS = Gradients(((1000, 500), (500, 200), (300_000,), *[(10_000,)] * 10))
"""1,000,000 numbers: 900,000 in tensors that DGC makes sparse, 600,000 in two that PowerSGD factors."""
MICRO = Micro(forward_s=0.010, backward_s=0.020)
UPDATE_S = 0.002
FAST, SLOW = Link(2, 1e9), Link(2, 1e7)
"""Two ranks: a ring all-reduce of 4 MB sends 4 MB, in 4 ms and in 400."""
KINDS = (
    Reducer(),
    Reducer.named("bf16_allreduce"),
    Reducer.named("fp16_allreduce"),
    Reducer.named("dgc", 0.999),
    Reducer.named("powersgd", 4),
    Reducer.named("localsgd", 4),
)


def exchanged(link: Link, reducer: Reducer | None = None, *, work_s: float = 0.0) -> Exchange:
    found = wire(reducer or Reducer(), GRADIENTS, link)
    return Exchange(reducer or Reducer(), found.seconds, work_s, found.bytes_sent)


def cost(
    link: Link, reducer: Reducer | None = None, *, micro: Micro = MICRO, merge_steps: int = 1, share: float = 1.0
) -> UpdateCost:
    return update_cost(micro, exchanged(link, reducer), update_s=UPDATE_S, merge_steps=merge_steps, hidden_share=share)


# --- the wire ---------------------------------------------------------------------------------------------------------------


def test_what_is_shorter_than_backward_is_hidden() -> None:
    found = cost(FAST)
    assert found.seconds == pytest.approx(0.032) and found.shown_s == 0 and found.bytes_sent == 4_000_000
    assert exchanged(FAST).wire_s == pytest.approx(0.004)


def test_what_is_longer_shows() -> None:
    assert cost(SLOW).shown_s == pytest.approx(0.380) and cost(SLOW).seconds == pytest.approx(0.412)


def test_of_what_could_be_hidden_only_the_measured_share_is() -> None:
    assert cost(SLOW, share=0.5).shown_s == pytest.approx(0.390)
    assert cost(SLOW, share=0.0).shown_s == pytest.approx(0.400)
    assert cost(SLOW, share=-1.0).shown_s == pytest.approx(0.420)  # the two get in each other's way
    assert cost(FAST, share=0.25).shown_s == pytest.approx(0.003)


def test_work_on_the_device_is_never_hidden() -> None:
    found = update_cost(MICRO, exchanged(FAST, Reducer.named("bf16_allreduce"), work_s=0.003), update_s=UPDATE_S)
    assert found.shown_s == pytest.approx(0.003) and found.seconds == pytest.approx(0.035)


def test_merging_pays_the_wire_once_and_hides_it_behind_one_backward() -> None:
    assert cost(SLOW, merge_steps=4).seconds == pytest.approx(4 * 0.030 + 0.380 + 0.002)
    assert cost(SLOW, merge_steps=4).bytes_sent == 4_000_000


@pytest.mark.parametrize("kind", ["bf16_allreduce", "fp16_allreduce"])
def test_16_bits_send_half(kind: str) -> None:
    found = cost(SLOW, Reducer.named(kind))
    assert found.bytes_sent == 2_000_000 and found.shown_s == pytest.approx(0.180)


def test_computing_again_costs_time_and_hides_as_much_of_the_wire() -> None:
    again = Micro(0.010, 0.020, again_s=0.005)
    assert cost(FAST, micro=again).seconds == pytest.approx(0.037)
    assert cost(SLOW, micro=again).seconds == pytest.approx(0.412)


def test_dgc_is_not_hidden_and_costs_work() -> None:
    sparse = exchanged(SLOW, Reducer.named("dgc", 0.999), work_s=0.003)
    assert sparse.bytes_sent == pytest.approx(400_000 + 900 * 8)  # 100,000 dense numbers, 900 entries
    assert update_cost(MICRO, sparse, update_s=UPDATE_S).seconds == pytest.approx(0.032 + 0.003 + 0.040_72)


def test_powersgd_sends_two_factors_of_each_matrix_and_the_rest_as_it_is() -> None:
    found = cost(SLOW, Reducer.named("powersgd", 4))
    assert found.bytes_sent == pytest.approx(4 * (4 * (1000 + 500) + 4 * (500 + 200) + 400_000))
    assert found.shown_s == pytest.approx(found.bytes_sent / 1e7)


def test_local_sgd_shares_one_averaging_and_its_work_among_its_period() -> None:
    found = update_cost(MICRO, exchanged(SLOW, Reducer.named("localsgd", 8), work_s=0.008), update_s=UPDATE_S)
    assert found.bytes_sent == 500_000 and found.seconds == pytest.approx(0.032 + 0.050 + 0.001)


def test_latency_counts_for_every_round_of_the_ring() -> None:
    late = Link(5, 1e9, latency_s=0.001)  # 8 rounds, 1.6 times the bytes
    assert wire(Reducer(), GRADIENTS, late).seconds == pytest.approx(8 * 0.001 + 6_400_000 / 1e9)


@pytest.mark.parametrize("reducer", KINDS, ids=lambda reducer: reducer.kind)
def test_one_rank_sends_nothing(reducer: Reducer) -> None:
    found = cost(Link(1, 1e9), reducer)
    assert found.bytes_sent == 0 and found.seconds == pytest.approx(0.032)


def test_a_sparse_gather_loses_to_a_dense_ring_beyond_one_over_the_density() -> None:
    all_sparse, reducer = Gradients(((1_000_000,),)), Reducer.named("dgc", 0.999)
    for ranks, wins in ((999, True), (1001, False), (4096, False)):
        link = Link(ranks, 1e8)
        assert (wire(reducer, all_sparse, link).seconds < wire(Reducer(), all_sparse, link).seconds) is wins


@pytest.mark.parametrize("reducer", KINDS, ids=lambda reducer: reducer.kind)
@given(
    ranks=st.integers(1, 4096),
    rates=st.tuples(st.floats(1e5, 1e11), st.floats(1e5, 1e11)),
    latency_s=st.floats(0, 0.01),
    share=st.floats(-1, 1),
    steps=st.integers(1, 16),
)
def test_a_faster_link_never_takes_longer_and_nothing_is_below_its_computing(
    reducer: Reducer, ranks: int, rates: tuple[float, float], latency_s: float, share: float, steps: int
) -> None:
    slow, fast = (cost(Link(ranks, rate, latency_s), reducer, merge_steps=steps, share=share) for rate in sorted(rates))
    assert fast.seconds <= slow.seconds * (1 + 1e-12)
    assert slow.bytes_sent == fast.bytes_sent
    assert fast.seconds >= (steps * MICRO.seconds + UPDATE_S) * (1 - 1e-12)


# --- overlap ----------------------------------------------------------------------------------------------------------------


@given(share=st.floats(-1, 1), rate=st.floats(1e6, 1e11), work_s=st.floats(0, 0.1), again_s=st.floats(0, 0.1))
def test_the_hidden_share_is_the_inverse_of_the_cost(share: float, rate: float, work_s: float, again_s: float) -> None:
    micro, exchange = Micro(0.010, 0.020, again_s), exchanged(Link(2, rate), work_s=work_s)
    seconds = update_cost(micro, exchange, update_s=UPDATE_S, hidden_share=share).seconds
    assert hidden_share(micro, exchange, update_s=UPDATE_S, seconds=seconds) == pytest.approx(share, abs=1e-6)


def test_the_hidden_share_stays_between_all_and_twice_nothing() -> None:
    exchange = exchanged(SLOW)
    assert hidden_share(MICRO, exchange, update_s=UPDATE_S, seconds=0.010) == 1.0
    assert hidden_share(MICRO, exchange, update_s=UPDATE_S, seconds=9.0) == -1.0
    assert hidden_share(MICRO, exchanged(Link(1, 1e9)), update_s=UPDATE_S, seconds=9.0) == 1.0  # there is nothing to hide


# --- memory and batches -----------------------------------------------------------------------------------------------------

LADDER = (Rung(1000, 0.0, 0), Rung(700, 0.001, 2), Rung(600, 0.004, 3), Rung(650, 0.005, 4))


@pytest.mark.parametrize(("limit", "peak"), [(float("inf"), 1000), (1000, 1000), (999, 700), (699, 600), (600, 600)])
def test_the_cheapest_rung_that_keeps_to_the_limit_is_taken(limit: float, peak: int) -> None:
    rung = rung_for(LADDER, limit)
    assert rung is not None and rung.peak_bytes == peak


def test_no_rung_is_taken_where_none_keeps_to_the_limit() -> None:
    assert rung_for(LADDER, 599) is None and rung_for((), float("inf")) is None


def test_half_of_what_a_sample_teaches_is_left_where_the_batch_is_the_noise_scale() -> None:
    assert statistical_efficiency(1000, 1000) == 0.5 and statistical_efficiency(0, 10) == 1.0
    assert statistical_efficiency(3000, 1000) == 0.25


def test_an_unknown_reducer_is_refused_with_those_that_are_known() -> None:
    known = "dense, adaptive_localsgd, bf16_allreduce, dgc, fp16_allreduce, localsgd, powersgd"
    with pytest.raises(ConfigError, match=f"'ring' is not known; there are {known}"):
        Reducer.named("ring")
