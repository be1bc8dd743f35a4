"""Forecasts of links, ranks and memory that are not here: numbers worked out by hand from made-up measures."""

from __future__ import annotations

import ast
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx.auto.candidate import Candidate
from fleetx.auto.chart import draw, spread
from fleetx.auto.cost import Gradients, Reducer, Rung
from fleetx.auto.link import LinkProfile
from fleetx.auto.measurements import Measured, Pass, Reduced
from fleetx.auto.plan import Plan
from fleetx.auto.what_if import WORLDS, Curve, Outlook, Question, candidate_of, curves, link_for, same_plan, what_if
from fleetx.cli.planning import curves_text, how_to_use, link_notes, outlook_text, rate, what_changed
from fleetx.dist.predicted_cost import Link, dense, low_rank, sparse
from fleetx.errors import ConfigError
from fleetx.strategy import DistributedStrategy

GRADIENTS = Gradients(((1000, 500), (500, 200), (300_000,), *[(10_000,)] * 10))
"""1,000,000 numbers: 900,000 in tensors that DGC makes sparse, 600,000 in two that PowerSGD factors."""
LADDER = (Rung(50_000_000, 0.0, 0), Rung(30_000_000, 0.004, 3))
PASS = Pass("float32", 8, 0.010, 0.020, LADDER)
UPDATE_S = 0.002
ALONE = Measured("CPU", LinkProfile(1, (), ()), GRADIENTS, UPDATE_S, (PASS,), (Reduced(Reducer(), 0.003, 0.0, 0, 12_000_000),))
"""A dense reducer of one rank has 1 ms of work beside the optimizer's 2."""
PAIR_LINK = LinkProfile(2, ((1e5, 1e-4 + 1e-4), (1e6, 1e-4 + 1e-3), (1e7, 1e-4 + 1e-2)), ((1e5, 2e-4), (1e7, 1e-2)))
"""Of an all-reduce of two ranks, which sends S bytes of S: 1 GB/s, and 0.1 ms in two messages."""
PAIR = replace(
    ALONE,
    link=PAIR_LINK,
    reduced=(
        Reduced(Reducer(), UPDATE_S + 0.0051, 4e6, 0, 12_000_000),
        Reduced(Reducer.named("dgc", 0.999), UPDATE_S + 0.0101, 4e5, 8_000_000, 12_000_000),
        Reduced(Reducer.named("localsgd", 1), UPDATE_S + 0.0061, 4e6, 4_000_000, 12_000_000),
    ),
)
GBIT = 1e9 / 8
HERE = Link(2, 1e9, 5e-5)


def plan_of(measured: Measured, **settings: object) -> Plan:
    return Plan(DistributedStrategy(**settings), "fp32", (), {}, {}, 0, 1, measured)


def seconds_of(outlook: Outlook, reducer: Reducer) -> float:
    wanted = Candidate(batch=8, reducer=reducer)
    return next(one.cost.seconds for one in outlook.forecasts if one.candidate == wanted)


# --- the link ---------------------------------------------------------------------------------------------------------------


def test_the_measured_link_is_found_again_and_changed_one_thing_at_a_time() -> None:
    here = PAIR.link.link()
    assert (here.ranks, here.bytes_per_s, here.latency_s) == (2, pytest.approx(1e9), pytest.approx(5e-5))
    assert link_for(here, Question(world=64)) == replace(here, ranks=64)
    assert link_for(here, Question(bytes_per_s=GBIT)) == replace(here, bytes_per_s=GBIT)
    assert link_for(here, Question(latency_s=0.0)) == replace(here, latency_s=0.0)


def test_one_rank_has_no_link_to_go_by() -> None:
    here = ALONE.link.link()
    assert link_for(here, Question()).ranks == 1
    assert link_for(here, Question(world=64, bytes_per_s=GBIT)) == Link(64, GBIT)
    with pytest.raises(ConfigError, match="as bandwidth=10Gbit"):
        link_for(here, Question(world=64))
    for question in (Question(bytes_per_s=GBIT), Question(latency_s=1e-3), Question(bytes_per_s=GBIT, world=1)):
        with pytest.raises(ConfigError, match="as world=64"):
            link_for(here, question)


# --- forecasts --------------------------------------------------------------------------------------------------------------


def test_a_dense_exchange_takes_the_wire_of_the_link_asked_for() -> None:
    link = Link(64, GBIT, 5e-5)
    found = what_if(PAIR, Question("exact", bytes_per_s=GBIT, latency_s=5e-5, world=64))
    wire_s = 2 * 63 * 5e-5 + 2 * 63 / 64 * 4e6 / GBIT  # 6.3 ms of latency, 63 ms of bytes
    assert wire_s == pytest.approx(0.0693) and dense(1_000_000, link).seconds == pytest.approx(wire_s)
    # Of the 5.1 ms that were measured 4.1 are the wire there: 1 ms is work. Backward hides 20 ms of the wire.
    assert found.chosen.cost.seconds == pytest.approx(0.030 + (wire_s - 0.020) + 0.001 + UPDATE_S, rel=1e-6)
    assert found.chosen.samples == 8 * 64 and found.chosen.cost.bytes_sent == pytest.approx(2 * 63 / 64 * 4e6)


def test_a_compressor_keeps_its_own_work_and_local_sgd_its_period() -> None:
    link = Link(16, GBIT, 5e-5)
    found = what_if(PAIR, Question("schedule", bytes_per_s=GBIT, world=16))
    here = sparse(900_000, HERE, sparsity=0.999, dense_numel=100_000).seconds
    there = sparse(900_000, link, sparsity=0.999, dense_numel=100_000).seconds
    assert seconds_of(found, Reducer.named("dgc", 0.999)) == pytest.approx(0.030 + there + (0.0101 - here) + UPDATE_S, rel=1e-6)
    averaging = dense(1_000_000, link).seconds + (0.0061 - dense(1_000_000, HERE).seconds)
    assert seconds_of(found, Reducer.named("localsgd", 4)) == pytest.approx(0.030 + averaging / 4 + UPDATE_S, rel=1e-6)


def test_a_reducer_that_was_not_measured_has_the_work_of_a_dense_one_and_that_is_said() -> None:
    found = what_if(ALONE, Question("lossy", bytes_per_s=GBIT, world=16))
    wire_s = low_rank(GRADIENTS.shapes[:2], Link(16, GBIT), rank=4, dense_numel=400_000).seconds
    assert seconds_of(found, Reducer.named("powersgd", 4)) == pytest.approx(0.030 + wire_s + 0.001 + UPDATE_S, rel=1e-6)
    assert found.unmeasured == {"bf16_allreduce", "powersgd", "quantized_allreduce", "dgc"}
    text = outlook_text(plan_of(ALONE), found)
    assert text.count("(work not measured)") == 5 and "the work on the device was not measured" in text
    assert "of bf16_allreduce, dgc, powersgd, quantized_allreduce only the bytes are known" in text


def test_how_much_work_a_choice_that_was_not_measured_could_bear_is_told() -> None:
    found = what_if(ALONE, Question("lossy", bytes_per_s=GBIT, world=16))
    assert found.chosen.candidate.reducer.label == "quantized_allreduce 4" and not found.is_measured(found.chosen)
    spare = seconds_of(found, Reducer()) - found.chosen.cost.seconds
    assert found.spare_work_s == pytest.approx(spare) and spare > 0.02
    assert f"less than {1e3 * spare:,.1f} ms in one exchange" in outlook_text(plan_of(ALONE), found)
    assert what_if(PAIR, Question("exact")).spare_work_s is None


def test_a_reducer_that_was_refused_is_no_candidate() -> None:
    refused = replace(ALONE, missing={"dgc": "refused: dgc needs SGD"})
    found = what_if(refused, Question("lossy", bytes_per_s=GBIT, world=16))
    assert found.refused == {"fp32, dgc 0.999": "refused: dgc needs SGD"}
    assert "fp32, dgc 0.999: refused: dgc needs SGD." in outlook_text(plan_of(refused), found)


def test_risk_bounds_the_candidates_and_one_rank_has_a_dense_reducer_alone() -> None:
    assert [one.candidate.name for one in what_if(PAIR, Question("exact", world=4)).forecasts] == ["fp32"]
    kinds = {one.candidate.reducer.kind for one in what_if(PAIR, Question("schedule", world=4)).forecasts}
    assert kinds == {"dense", "bf16_allreduce", "powersgd", "quantized_allreduce", "dgc", "localsgd"}
    assert {one.candidate.merge_steps for one in what_if(ALONE, Question("schedule")).forecasts} == {1, 2, 4, 8}
    assert {one.candidate.reducer for one in what_if(PAIR, Question("schedule", world=1)).forecasts} == {Reducer()}


def test_memory_alone_leaves_the_exchange_as_measured_and_computes_again() -> None:
    roomy, tight = what_if(PAIR, Question("exact")).chosen, what_if(PAIR, Question("exact", memory=40_000_000)).chosen
    assert roomy.cost.seconds == pytest.approx(0.030 + UPDATE_S) and not roomy.candidate.recomputes  # 5.1 ms are hidden
    assert tight.cost.seconds == pytest.approx(0.034 + UPDATE_S) and tight.candidate.recomputes
    with pytest.raises(
        ConfigError, match=r'no plan of risk "exact" or less that keeps to 19.07 MiB \(fp32: needs at least 28.61 MiB'
    ):
        what_if(PAIR, Question("exact", memory=20_000_000))


def test_a_global_batch_is_made_up_of_measured_micro_batches() -> None:
    several = replace(PAIR, passes=(PASS, replace(PASS, batch=16, forward_s=0.018, backward_s=0.038)))
    found = what_if(several, Question("exact", global_batch=256, world=8))
    assert {(one.candidate.batch, one.candidate.merge_steps) for one in found.forecasts} == {(8, 4), (16, 2)}
    assert all(one.samples == 256 and one.candidate.risk.value == "exact" for one in found.forecasts)
    with pytest.raises(ConfigError, match="cannot be shared equally by 3 ranks"):
        what_if(several, Question("exact", global_batch=256, world=3))
    with pytest.raises(ConfigError, match=r"gives each 4 rows.*\(8, 16 rows\)"):
        what_if(several, Question("exact", global_batch=256, world=64))


def test_the_fastest_for_a_sample_comes_first_and_the_less_risky_of_two_alike_is_chosen() -> None:
    found = what_if(PAIR, Question("schedule", bytes_per_s=GBIT, world=64))
    speeds = [one.seconds_per_sample for one in found.forecasts]
    assert speeds == sorted(speeds) and found.chosen.seconds_per_sample <= 1.02 * speeds[0]
    fast = what_if(PAIR, Question("rounding", bytes_per_s=1e12, latency_s=0.0))  # both reducers are hidden whole
    assert fast.forecasts[0].candidate.name == "fp32" == fast.chosen.candidate.name


# --- what changed -----------------------------------------------------------------------------------------------------------


def test_one_sentence_says_what_became_of_the_plan() -> None:
    plan = plan_of(PAIR)
    same = what_changed(plan, what_if(PAIR, Question("exact", world=4)))
    assert same.startswith("the same: as measured (2 ranks, 8 Gbit/s each, latency 50 us) fp32 was taken; here it makes")
    slow = what_if(PAIR, Question("rounding", bytes_per_s=GBIT / 10))
    now = same_plan(slow, candidate_of(plan))
    assert not isinstance(now, str) and slow.chosen.candidate.name == "fp32, bf16_allreduce"
    speed = now.samples / now.cost.seconds
    assert f"here it would make {speed:,.1f} samples/s, and fp32, bf16_allreduce makes" in what_changed(plan, slow)
    risky = plan_of(PAIR, localsgd=True, localsgd_configs={"k_steps": 4})
    told = what_changed(risky, what_if(PAIR, Question("exact")))
    assert 'here it has risk "schedule", which is not allowed, and fp32 makes' in told


@pytest.mark.parametrize(
    "settings",
    [
        {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
        {"recompute": True, "recompute_configs": {"budget": 10**9}, "gradient_merge": True},
        {"localsgd": True, "localsgd_configs": {"k_steps": 8}, "fuse_grad_size_in_MB": 16},
    ],
)
def test_what_to_write_makes_the_strategy_of_the_plan(settings: dict[str, object]) -> None:
    plan = plan_of(ALONE, **settings)
    code = how_to_use(plan).removeprefix("to use it: strategy = ").removesuffix(".")
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call) and ast.unparse(call.func) == "fleet.DistributedStrategy"
    written = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    assert DistributedStrategy(**written).to_dict() == plan.strategy.to_dict()


def test_a_plan_without_a_strategy_says_so() -> None:
    assert "fleet.distribute(model, optimizer) needs no strategy." in how_to_use(plan_of(ALONE))


def test_a_plan_is_read_by_its_strategy() -> None:
    assert candidate_of(plan_of(PAIR)) == Candidate(batch=8)
    settings = {"amp": True, "amp_configs": {"dtype": "bfloat16"}, "dgc": True, "dgc_configs": {"sparsity": [0.9, 0.99]}}
    assert candidate_of(plan_of(PAIR, **settings)) == Candidate("bfloat16", 8, 1, Reducer.named("dgc", 0.99))
    merged = replace(plan_of(PAIR, powersgd=True), micro_batch=4, merge_steps=2)
    assert candidate_of(merged) == Candidate("float32", 4, 2, Reducer.named("powersgd", 4))


# --- by the number of ranks -------------------------------------------------------------------------------------------------


def test_every_reducer_has_a_curve_up_to_4096_ranks() -> None:
    found = {curve.name: curve for curve in curves(PAIR, Candidate(batch=8), Question(bytes_per_s=GBIT, latency_s=0.0))}
    assert list(found) == ["dense", "bf16_allreduce", "powersgd 4", "quantized_allreduce 4", "dgc 0.999", "localsgd 16"]
    assert [found[name].is_measured for name in found] == [True, False, False, False, True, True]
    assert all(tuple(curve.seconds) == WORLDS for curve in found.values()) and WORLDS[0] == 1 and WORLDS[-1] == 4096
    assert found["dense"].seconds[1] == pytest.approx(0.030 + 0.001 + UPDATE_S, rel=1e-6)
    wire_s = 2 * 4095 / 4096 * 4e6 / GBIT
    assert found["dense"].seconds[4096] == pytest.approx(0.030 + (wire_s - 0.020) + 0.001 + UPDATE_S, rel=1e-6)
    assert found["dgc 0.999"].seconds[4096] > found["dense"].seconds[4096]  # a gather grows with the ranks
    assert found["localsgd 16"].risk == "schedule" and found["dense"].risk == "exact"


def test_curves_have_the_plans_own_setting_and_want_a_rate() -> None:
    base = Candidate(batch=8, reducer=Reducer.named("localsgd", 4))
    assert "localsgd 4" in [curve.name for curve in curves(PAIR, base, Question())]
    with pytest.raises(ConfigError, match="bandwidth=10Gbit"):
        curves(ALONE, Candidate(batch=8), Question())
    with pytest.raises(ConfigError, match="bf16 with any number of ranks: bfloat16 was not measured"):
        curves(PAIR, Candidate("bfloat16", 8), Question())


def test_the_table_of_curves_has_five_worlds() -> None:
    lines = curves_text("title", [Curve("dense", "exact", {2: 0.001, 8: 0.0025, 64: 1.5}, False)]).splitlines()
    assert lines[1].split() == ["2", "8", "64", "512", "4096", "risk"]
    assert lines[2].split() == ["dense", "1.0", "2.5", "1,500.0", "-", "-", "exact", "(work", "not", "measured)"]


def test_what_is_taken_for_granted_is_told() -> None:
    assert "no latency (latency= sets one)" in link_notes(ALONE, Question(bytes_per_s=GBIT))[1]
    assert "latency" not in link_notes(ALONE, Question(bytes_per_s=GBIT, latency_s=1e-5))[1]
    assert "as measured with 2 ranks" in link_notes(PAIR, Question())[1]


def test_rates_are_told_in_bits() -> None:
    assert [rate(8e9), rate(1.25e9), rate(12.5e6), rate(125.0)] == ["64 Gbit/s", "10 Gbit/s", "100 Mbit/s", "1 kbit/s"]


# --- the chart --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_names_of_lines_are_moved_apart_and_keep_their_order(heights: list[float]) -> None:
    found = spread(heights, gap=0.05)
    order = sorted(range(len(heights)), key=lambda place: (heights[place], place))
    assert all(found[b] - found[a] >= 0.05 - 1e-9 for a, b in itertools.pairwise(order))
    if all(b - a >= 0.05 for a, b in itertools.pairwise(sorted(heights))):
        assert found == pytest.approx(heights)


@pytest.mark.parametrize(("name", "begins"), [("time.png", b"\x89PNG"), ("time.svg", b"<?xml")])
def test_a_chart_is_of_the_kind_that_its_name_says(tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / name, curves(PAIR, Candidate(batch=8), Question()), "a title")
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_chart_without_matplotlib_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'a chart needs matplotlib: pip install "fleetx\[demo\]"'):
        draw(tmp_path / "time.png", [], "a title")


# --- parts that save memory ---------------------------------------------------------------------------------------------------

KEEPS = replace(
    PAIR, passes=(replace(PASS, ladder=(Rung(50_000_000, 0.0, 0), Rung(46_000_000, 0.004, 3))),), state_bytes=8_000_000
)
"""An optimizer keeps 8 MB, and computing all again saves as much as 4."""


def test_sharding_is_the_answer_where_the_memory_leaves_nothing_else() -> None:
    found = what_if(KEEPS, Question(memory=46_500_000))
    assert {one.candidate.reducer.kind for one in found.forecasts} == {"dense", "bf16_allreduce", "sharding"}
    found = what_if(KEEPS, Question(memory=45_900_000))
    assert all(one.candidate.reducer.kind == "sharding" or one.candidate.recomputes for one in found.forecasts)
    alone = replace(KEEPS, passes=(replace(PASS, ladder=(Rung(50_000_000, 0.0, 0),)),))
    found = what_if(alone, Question(memory=46_000_000))
    assert found.chosen.candidate.name == "fp32, sharding" and len(found.forecasts) == 1
    assert found.chosen.peak_bytes == 50_000_000 - 4_000_000  # half of the state on each of two ranks
    assert found.unmeasured >= {"sharding"}


def test_more_ranks_keep_less_of_the_state_each_and_send_what_plain_training_sends() -> None:
    alone = replace(KEEPS, passes=(replace(PASS, ladder=(Rung(50_000_000, 0.0, 0),)),))
    found = what_if(alone, Question(memory=43_000_000, world=8, risk="rounding")).chosen
    assert (found.candidate.reducer.kind, found.peak_bytes) == ("sharding", 50_000_000 - 7_000_000)
    assert found.cost.bytes_sent == dense(1_000_000, Link(8, 1e9, 5e-5)).bytes_sent
    with pytest.raises(ConfigError, match="needs at least"):
        what_if(alone, Question(memory=43_000_000))
    assert all(one.candidate.reducer.kind != "sharding" for one in what_if(KEEPS, Question(memory=51_000_000)).forecasts)
