"""What `auto` may choose, what it predicts, and the plan it writes: from measurements made up here, checked by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetx.auto.candidate import DENSE, RISKS, Candidate, allows, batches_of, every, offered
from fleetx.auto.cost import Gradients, Reducer, Rung, wire
from fleetx.auto.explain import compiling_pays, rejected
from fleetx.auto.link import LinkProfile
from fleetx.auto.measurements import Forecast, Measured, Pass, Reduced, forecast, from_plain, to_plain
from fleetx.auto.plan import Plan, Row, differences, from_json, load, to_json
from fleetx.auto.probe import ladder_of, on_line
from fleetx.auto.request import least_share
from fleetx.auto.run_measurements import gradients_of
from fleetx.dist.predicted_cost import Link, as_matrix, low_rank, sparse
from fleetx.engine.setup.conflicts import check_parts
from fleetx.engine.slots import PlanContext, Risk
from fleetx.errors import ConfigError
from fleetx.recompute.profile import Element, Profile, Way
from fleetx.reduce.powersgd import matrix_shape
from fleetx.strategies.localsgd import LocalSGD
from fleetx.strategy import DistributedStrategy

MB = 10**6
REDUCERS = offered(PlanContext(ranks=2))
GRADIENTS = Gradients(((1000, 500), (400_000,), *[(10_000,)] * 10))
"""1,000,000 numbers: 900,000 in tensors that DGC makes sparse, 500,000 in one that PowerSGD factors."""
DGC = Reducer.named("dgc", 0.999)
IN_8_BITS = Reducer(LocalSGD(k_steps=1, wire_dtype="int8"))


def measured_on(bytes_per_s: float) -> Measured:
    """Two ranks without latency; 4 MB of gradients. DGC sends 0.4072 MB, and chooses it for 9.4 ms."""
    points = tuple((float(count), count / bytes_per_s) for count in (1e6, 4e6, 16e6))
    passes = (
        Pass("float32", 8, 0.010, 0.020, (Rung(1000 * MB, 0.0, 0), Rung(700 * MB, 0.004, 2), Rung(500 * MB, 0.009, 5))),
        Pass("bfloat16", 8, 0.006, 0.012, (Rung(600 * MB, 0.0, 0),)),
    )
    reduced = (
        Reduced(Reducer(), 0.002 + 4e6 / bytes_per_s, 4e6, 0, 300 * MB),
        Reduced(Reducer.named("bf16_allreduce"), 0.002 + 2e6 / bytes_per_s, 2e6, 0, 300 * MB),
        Reduced(DGC, 0.002 + 0.4072e6 / bytes_per_s + 0.0094, 0.4072e6, 8 * MB, 310 * MB),
        Reduced(Reducer.named("localsgd", 1), 0.002 + 4e6 / bytes_per_s, 4e6, 4 * MB, 304 * MB),
        Reduced(IN_8_BITS, 0.002 + 1.008e6 / bytes_per_s, 1.008e6, 4 * MB, 304 * MB),
    )
    return Measured("CPU", LinkProfile(2, points, points), GRADIENTS, 0.002, passes, reduced, missing={"powersgd": "refused: x."})


FAST, SLOW = measured_on(1e9), measured_on(1e7)
PLAIN = Candidate("float32", 8)


def predicted(measured: Measured, candidate: Candidate, **given: Any) -> Forecast:
    found = forecast(measured, candidate, **given)
    assert isinstance(found, Forecast), found
    return found


# --- candidates -------------------------------------------------------------------------------------------------------------


def test_exact_is_float32_and_dense_alone_and_each_class_adds_to_the_one_before() -> None:
    found = [set(every(["float32", "bfloat16"], [(8, 1), (8, 2)], REDUCERS, own_batch=True, risk=risk.value)) for risk in RISKS]
    assert found[0] == {PLAIN}
    assert found[0] < found[1] < found[2] < found[3]
    assert {(c.precision, c.reducer.kind, c.merge_steps) for c in found[1]} == {
        (precision, kind, 1) for precision in ("float32", "bfloat16") for kind in ("dense", "bf16_allreduce")
    }
    assert {c.reducer.kind for c in found[2]} == {"dense", "bf16_allreduce", "powersgd", "quantized_allreduce", "dgc"}
    assert len(found[3]) == 2 * 2 * len(REDUCERS)


def test_merging_changes_nothing_but_rounding_where_the_global_batch_is_given() -> None:
    found = list(every(["float32"], [(16, 1), (8, 2)], REDUCERS[:1], own_batch=False, risk="exact"))
    assert [(c.batch, c.merge_steps, c.risk) for c in found] == [(16, 1, Risk.EXACT), (8, 2, Risk.EXACT)]


@pytest.mark.parametrize("reducer", REDUCERS, ids=lambda reducer: reducer.label)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_every_candidate_is_a_legal_strategy_of_no_more_than_its_risk(precision: str, reducer: Reducer) -> None:
    candidate = Candidate(precision, 8, 2, reducer, recomputes=True, grows_batch=True)
    parts = candidate.strategy(memory=10**9).parts()
    check_parts(parts)
    wanted = {"recompute", "gradient_merge", *([] if precision == "float32" else ["amp"])}
    assert {part.name for part in parts} == wanted | ({reducer.kind} - {"dense"})
    alone = Candidate(precision, 8, 1, reducer)
    assert all(allows(alone.risk.value, part.risk_class) for part in alone.strategy().parts())


def test_the_plain_candidate_is_the_plain_strategy() -> None:
    assert PLAIN.strategy() == DistributedStrategy() and PLAIN.name == "fp32"


def test_a_name_tells_all_that_is_set() -> None:
    full = Candidate("bfloat16", 8, 4, Reducer.named("localsgd", 16), recomputes=True)
    assert full.name == "bf16, recompute, 4 x 8, localsgd 16"
    assert Candidate(merge_steps=4).name == "fp32, merge 4" and Candidate(reducer=DGC).name == "fp32, dgc 0.999"


def test_the_settings_of_a_reducer_come_to_its_part() -> None:
    strategy = Candidate("float32", 8, 1, Reducer.named("powersgd", 4)).strategy()
    assert strategy.powersgd and strategy.powersgd_configs["rank"] == 4
    assert Candidate(reducer=DGC).strategy().dgc_configs["sparsity"] == [0.999]
    assert Candidate(reducer=Reducer.named("localsgd", 8)).strategy().localsgd_configs["k_steps"] == 8
    tight = Candidate(recomputes=True).strategy(memory=700 * MB)
    assert tight.recompute and tight.recompute_configs["budget"] == 700 * MB


def test_a_trial_of_powersgd_skips_the_dense_updates_at_its_start() -> None:
    reducer = Reducer.named("powersgd", 4)
    timed, trained = (Candidate(reducer=one).strategy() for one in (reducer.steady(), reducer))
    assert timed.powersgd_configs == {**trained.powersgd_configs, "begin_step": 0}
    assert trained.powersgd_configs["rank"] == 4 and trained.powersgd_configs["begin_step"] == 10
    assert DGC.steady().settings() == DGC.settings()


@given(share=st.integers(1, 4096), near=st.integers(1, 512))
def test_micro_batches_make_up_the_share_without_a_rest_and_are_near_the_sample(share: int, near: int) -> None:
    found = batches_of(share, near=near)
    assert found == sorted(found, reverse=True) and found
    assert all(batch * steps == share for batch, steps in found)
    if len(found) > 1:
        assert all(near / 8 <= batch <= 16 * near for batch, _ in found)


def test_of_micro_batches_that_are_all_far_the_nearest_is_taken() -> None:
    assert batches_of(7, near=1000) == [(7, 1)] and batches_of(4099, near=1) == [(1, 4099)]
    assert batches_of(24, near=8) == [(24, 1), (12, 2), (8, 3), (6, 4), (4, 6), (3, 8), (2, 12), (1, 24)]


def test_gradients_are_counted_as_the_compressors_see_them() -> None:
    found, link = gradients_of([torch.zeros(128, 128), torch.zeros(128), torch.zeros(200, 100)]), Link(2, 1e9)
    assert found.numel == 16384 + 128 + 20000
    assert wire(DGC, found, link) == sparse(16384 + 20000, link, sparsity=0.999, dense_numel=128)
    factored = low_rank([(128, 128), (200, 100)], link, rank=4, dense_numel=128)
    assert wire(Reducer.named("powersgd", 4), found, link) == factored


def test_rows_of_a_gradient_are_its_outermost_dimension_in_memory() -> None:
    image = torch.zeros(8, 16, 3, 5)
    last = image.to(memory_format=torch.channels_last)
    rows = torch.zeros(1, 12)
    assert gradients_of([image, last, last[:, ::2], rows]).shapes == ((8, 16, 3, 5), (8, 3, 5, 16), (8, 8, 3, 5), (12, 1))
    for tensor in (image, last, last[:, ::2], rows, torch.zeros(7), torch.zeros(0, 3), torch.zeros(2, 3, 4).permute(2, 0, 1)):
        assert as_matrix(gradients_of([tensor]).shapes[0]) == matrix_shape(tensor)


# --- the forecast -----------------------------------------------------------------------------------------------------------


def test_a_plain_update_is_its_pass_its_step_and_what_backward_does_not_hide() -> None:
    assert predicted(FAST, PLAIN).cost.seconds == pytest.approx(0.032)
    slow = predicted(SLOW, PLAIN)
    assert slow.cost.seconds == pytest.approx(0.412) and slow.samples == 16 and slow.peak_bytes == 1000 * MB
    assert slow.seconds_per_sample == pytest.approx(0.412 / 16)


def test_precision_merging_and_reducers_change_what_they_stand_for() -> None:
    assert predicted(SLOW, Candidate("bfloat16", 8)).cost.seconds == pytest.approx(0.018 + 0.388 + 0.002)
    merged = predicted(SLOW, Candidate("float32", 8, 4, grows_batch=True))
    assert merged.cost.seconds == pytest.approx(4 * 0.030 + 0.380 + 0.002) and merged.samples == 64
    assert predicted(SLOW, Candidate("float32", 8, 1, Reducer.named("bf16_allreduce"))).cost.shown_s == pytest.approx(0.180)
    sparse = predicted(SLOW, Candidate("float32", 8, 1, DGC))
    assert sparse.cost.seconds == pytest.approx(0.032 + 0.040_72 + 0.0094) and sparse.peak_bytes == 1008 * MB
    local = predicted(SLOW, Candidate("float32", 8, 1, Reducer.named("localsgd", 8)))
    assert local.cost.seconds == pytest.approx(0.032 + 0.050) and local.cost.bytes_sent == 500_000


def test_recompute_follows_from_the_memory_and_from_what_the_reducer_keeps() -> None:
    fits, tight = predicted(FAST, PLAIN, memory=1000 * MB), predicted(FAST, PLAIN, memory=999 * MB)
    assert not fits.candidate.recomputes and tight.candidate.recomputes
    assert tight.peak_bytes == 700 * MB and tight.cost.seconds == pytest.approx(0.036) and tight.again_s == 0.004
    kept = predicted(FAST, Candidate("float32", 8, 1, DGC), memory=707 * MB)  # 8 MB of it are DGC's
    assert kept.peak_bytes == 508 * MB and kept.again_s == 0.009
    assert not predicted(FAST, Candidate("bfloat16", 8), memory=700 * MB).candidate.recomputes


def test_compiling_is_weighed_against_the_updates_that_earn_it_back() -> None:
    compiled = replace(FAST.passes[0], forward_s=0.004, backward_s=0.010, is_compiled=True, compile_s=30.0)
    measured = replace(FAST, passes=(*FAST.passes, compiled))
    wanted = Candidate("float32", 8, compiles=True)
    assert measured.compiled == ["float32"] and measured.precisions == ["float32", "bfloat16"]
    endless = predicted(measured, wanted)
    assert endless.cost.seconds == pytest.approx(0.032 - 0.016) and endless.once_s == 0
    for steps, is_faster in ((1000, False), (10_000, True)):
        found, plain = (predicted(measured, one, total_steps=steps) for one in (wanted, PLAIN))
        assert found.once_s == 30.0 / steps and plain.once_s == 0
        assert (found.seconds_per_sample < plain.seconds_per_sample) == is_faster  # 16 ms are saved: 1,875 updates earn it back
    [note] = compiling_pays(measured, endless, memory=None, total_steps=None)
    assert note == "compiling takes 30.0 s, once, and saves 16.0 ms an update by the forecast: earned back after 1,875 updates."
    assert compiling_pays(measured, predicted(measured, PLAIN), memory=None, total_steps=None) == []
    for risk, kinds in (("rounding", [False, True]), ("exact", [False])):
        wanted_of = every(["float32"], [(8, 1)], [DENSE], own_batch=True, risk=risk, compiled=["float32"])
        assert [one.compiles for one in wanted_of] == kinds


def test_what_does_not_fit_or_was_not_measured_is_told_in_words() -> None:
    assert forecast(FAST, PLAIN, memory=499 * MB) == "needs at least 476.84 MiB"
    assert forecast(FAST, PLAIN, memory=250 * MB) == "its update alone needs 286.1 MiB"
    assert forecast(FAST, Candidate("float16", 8)) == "float16 was not measured"
    assert forecast(FAST, Candidate("float32", 8, 1, Reducer.named("powersgd", 4))) == "refused: x."
    blind = replace(FAST, passes=(Pass("float32", 8, 0.010, 0.020),))
    assert forecast(blind, PLAIN, memory=900 * MB) == "its memory was not measured"
    assert predicted(blind, PLAIN).cost.seconds == pytest.approx(0.032)


def test_over_another_link_a_dense_update_takes_its_bytes_over_the_bandwidth() -> None:
    for ranks, rate in ((2, 1e6), (64, 1e6), (4096, 1e7)):
        found = predicted(FAST, PLAIN, link=Link(ranks, rate))
        wire_s = 2 * (ranks - 1) / ranks * 4e6 / rate
        assert found.cost.seconds == pytest.approx(0.032 + wire_s - 0.020) and found.samples == 8 * ranks


def test_over_the_same_link_the_forecast_is_the_measured_one() -> None:
    for candidate in (PLAIN, Candidate("float32", 8, 1, DGC), Candidate("float32", 8, 1, Reducer.named("localsgd", 8))):
        there = predicted(SLOW, candidate, link=SLOW.link.link())
        assert there.cost.seconds == pytest.approx(predicted(SLOW, candidate).cost.seconds)


def test_dgc_loses_to_dense_beyond_as_many_ranks_as_its_density_allows() -> None:
    sparse = Candidate("float32", 8, 1, DGC)

    def gain(ranks: int) -> float:
        plain, other = (predicted(FAST, c, link=Link(ranks, 1e6)).cost.seconds for c in (PLAIN, sparse))
        return plain - other

    assert gain(8) > 0 and gain(500) > 0 and gain(1000) < 0 and gain(4096) < 0


@given(
    rates=st.tuples(st.floats(1e5, 1e11), st.floats(1e5, 1e11)),
    ranks=st.integers(2, 4096),
    reducer=st.sampled_from([one for one in REDUCERS if one.kind not in ("powersgd", "quantized_allreduce")]),
    steps=st.sampled_from([1, 2, 8]),
)
def test_more_bandwidth_never_makes_an_update_slower(
    rates: tuple[float, float], ranks: int, reducer: Reducer, steps: int
) -> None:
    candidate = Candidate("float32", 8, steps, reducer)
    slow, fast = (predicted(FAST, candidate, link=Link(ranks, rate)).cost for rate in sorted(rates))
    assert fast.seconds <= slow.seconds * (1 + 1e-12) and fast.bytes_sent == slow.bytes_sent


@given(limits=st.tuples(st.integers(490, 1100), st.integers(490, 1100)))
def test_more_memory_never_makes_an_update_slower(limits: tuple[int, int]) -> None:
    less, more = (forecast(FAST, PLAIN, memory=limit * MB) for limit in sorted(limits))
    if isinstance(more, str):
        assert isinstance(less, str)
    elif isinstance(less, Forecast):
        assert more.cost.seconds <= less.cost.seconds
        assert less.peak_bytes <= min(limits) * MB


# --- ladders and times of other batches -------------------------------------------------------------------------------------


def chain(inside: int, output: int, seconds: list[float]) -> Profile:
    """Units in a row, each with so many bytes inside it and of its output, which the next one saves."""
    sizes, elements, given = {0: 0}, list[Element](), 0
    for i, again_s in enumerate(seconds):
        inner, out = 2 * i + 1, 2 * i + 2
        sizes |= {inner: inside, out: output}
        stored = Way(frozenset({given, inner}), inside + output, 0)
        elements.append(Element(i, stored, Way(frozenset({given}), inside + output, inside, again_s)))
        given = out
    elements.append(Element(None, Way(frozenset({given}), 0, 0)))
    return Profile(tuple(f"unit{i}" for i in range(len(seconds))), tuple(elements), sizes, 0)


def test_a_ladder_begins_with_nothing_and_falls_as_it_costs_more() -> None:
    profile = chain(100, 10, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    ladder = ladder_of(profile, [400])
    assert ladder[0].units == 0 and ladder[0].again_s == 0 and len(ladder) >= 3
    costs, peaks = [rung.again_s for rung in ladder], [rung.peak_bytes for rung in ladder]
    assert costs == sorted(costs) and peaks == sorted(peaks, reverse=True)
    assert any(rung.peak_bytes <= 400 for rung in ladder)


def test_times_of_other_batches_lie_on_a_line_and_no_batch_takes_less_than_its_share() -> None:
    points = [(8, 0.010), (16, 0.018)]
    assert on_line(points, 12) == pytest.approx(0.014) and on_line(points, 16) == 0.018
    assert on_line(points, 4) == pytest.approx(0.006)
    assert on_line(points, 32) == pytest.approx(0.036)  # the line itself would be at 0.034
    assert on_line([(8, 0.010), (16, 0.030)], 4) == pytest.approx(0.005)  # and here at 0
    assert on_line([(8, 0.030), (16, 0.010)], 64) == pytest.approx(0.040)
    assert on_line([(8, 0.010)], 16) == pytest.approx(0.020)


# --- words ------------------------------------------------------------------------------------------------------------------


def sentences(
    measured: Measured,
    *,
    risk: str = "schedule",
    memory: int | None = None,
    asked: bool = False,
    ran: dict[Candidate, float] | None = None,
) -> dict[str, str]:
    rules: dict[str, float | str] = {"lars": 0.003, "lamb": "takes the place of torch.optim.Adam."}
    chosen = predicted(measured, PLAIN, memory=memory)
    return rejected(measured, chosen, risk=risk, memory=memory, asked_batch=asked, rules=rules, ran=ran or {})


def test_every_strategy_that_was_not_taken_has_one_sentence() -> None:
    for risk in ("exact", "rounding", "lossy", "schedule"):
        found = sentences(FAST, risk=risk)
        kinds = {"recompute", "gradient_merge", "bf16_allreduce", "fp16_allreduce", "powersgd", "dgc"}
        kinds |= {"localsgd", "adaptive_localsgd", "quantized_allreduce"}
        assert set(found) == kinds | {"amp bf16", "lars", "lamb"}
        assert all(text.endswith(".") and not text.endswith("..") for text in found.values())
        numberless = ("powersgd", "quantized_allreduce", "lamb", "amp bf16", "adaptive_localsgd")
        assert all(re.search(r"\d", text) for name, text in found.items() if name not in numberless)


def test_a_sentence_of_a_reducer_has_both_sides_in_numbers() -> None:
    assert sentences(SLOW)["dgc"] == (
        "saves 339.3 ms of wire, costs 9.4 ms of work; an update takes 82.1 ms with it, and 412.0 ms as chosen."
    )
    assert sentences(FAST)["dgc"] == (
        "waits 0.4 ms longer for the wire, costs 9.4 ms of work; an update takes 41.8 ms with it, and 32.0 ms as chosen."
    )


def test_a_sentence_tells_what_was_measured_where_both_were_run() -> None:
    ran = {PLAIN: 0.0333, Candidate("float32", 8, 1, DGC): 0.0444}
    assert sentences(FAST, ran=ran)["dgc"].endswith(" Run, fp32, dgc 0.999 took 44.4 ms, and fp32 33.3 ms.")
    assert "Run," not in sentences(FAST, ran=ran)["localsgd"]


def test_what_the_risk_forbids_is_told_with_what_it_would_send() -> None:
    text = sentences(SLOW, risk="rounding")["dgc"]
    assert "would send 0.41 MB in place of 4.00 an update, in 40.7 ms in place of 400.0 ms" in text
    assert 'its risk is "lossy", and auto_configs["risk"] is "rounding".' in text
    assert "0.25 MB in place of 4.00" in sentences(SLOW, risk="rounding")["localsgd"]  # 16 updates share one
    assert "380.0 ms of exchange" in sentences(SLOW, risk="rounding")["gradient_merge"]


def test_recompute_is_told_with_what_it_would_save() -> None:
    assert sentences(FAST)["recompute"] == (
        "not needed: the step takes 953.67 MiB, and no limit was given; 5 units computed again would make it "
        "476.84 MiB, and 9.0 ms longer."
    )
    assert "and there are 1.86 GiB" in sentences(FAST, memory=2000 * MB)["recompute"]
    assert "recompute" not in sentences(FAST, memory=900 * MB)  # it was taken


def test_a_precision_that_is_slower_says_by_how_much() -> None:
    slower = replace(FAST, passes=(FAST.passes[0], Pass("bfloat16", 8, 0.020, 0.040, (Rung(600 * MB, 0.0, 0),))))
    assert sentences(slower)["amp bf16"] == "an update would take 62.0 ms in place of 32.0 ms, by the forecast."


def test_other_rules_of_an_update_are_told_with_their_time() -> None:
    assert sentences(FAST)["lars"].startswith("its update takes 3.0 ms, the optimizer's own 2.0 ms;")
    expected = "the rule of an update is never changed by auto. Asked for by hand, takes the place of torch.optim.Adam."
    assert sentences(FAST)["lamb"] == expected


def test_one_rank_has_no_reducers_to_tell_of() -> None:
    alone = replace(FAST, link=LinkProfile(1, (), ()), reduced=FAST.reduced[:1])
    assert {"dgc", "powersgd", "localsgd", "bf16_allreduce"}.isdisjoint(sentences(alone)) and "reducers" in sentences(alone)


# --- the plan and its file --------------------------------------------------------------------------------------------------


def a_plan(**other: Any) -> Plan:
    strategy = DistributedStrategy(recompute=True, recompute_configs={"budget": 700 * MB}, fuse_grad_size_in_MB=16)
    rows = (
        Row("fp32, recompute", "exact", 0.0364, 0.0378, 16, 700 * MB, 699 * MB, 4e6),
        Row("fp32, dgc 0.999", "lossy", 0.082, None, 16, 1008 * MB, None, 0.4072e6, "ran out of memory (on rank 1)"),
    )
    found = Plan(
        strategy=strategy,
        chosen="fp32, recompute",
        rows=rows,
        rejected={"dgc": "costs 9.4 ms."},
        key={"model": "ab", "ranks": 2},
        micro_batch=0,
        merge_steps=1,
        measured=FAST,
        memory=700 * MB,
        notes=("a note.",),
        seconds=7.4,
    )
    return replace(found, **other)


def test_a_plan_comes_back_from_its_text_as_it_was() -> None:
    plan = a_plan(measured=replace(FAST, noise_scale=12.5, hidden_share=-0.25))
    again = from_json(to_json(plan), source="plan.json")
    assert again == plan and again.strategy == plan.strategy and again.reused_from == "plan.json"
    assert to_json(again) == to_json(plan)
    assert from_plain(json.loads(json.dumps(to_plain(FAST)))) == FAST


def test_a_plan_file_is_readable_and_keeps_the_one_before(tmp_path: Path) -> None:
    file, before = tmp_path / "plan.json", tmp_path / "plan.json.previous"
    first, second = a_plan(), a_plan(seconds=9.0)
    first.save(file)
    first.save(file)
    assert load(file) == first and not before.exists()  # the same plan pushes nothing aside
    second.save(file)
    assert load(file) == second and load(before) == first
    assert ' "seconds": 9.0,' in file.read_text().splitlines()  # a line for each, to be read and compared


def test_the_strategy_in_the_file_may_be_edited() -> None:
    plain = json.loads(to_json(a_plan()))
    plain["strategy"] = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
    assert from_json(json.dumps(plain), source="p").strategy == Candidate("bfloat16").strategy()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda plain: "", "p.json is not a plan of fleetx"),
        (lambda plain: "[1, 2]", "p.json is not a plan of fleetx"),
        (lambda plain: json.dumps(plain)[:-40], "p.json is not a plan of fleetx"),
        (
            lambda plain: json.dumps({**plain, "fleetx_plan": 99}),
            "p.json: this is a plan of format 99; this version reads format",
        ),
        (lambda plain: json.dumps({k: v for k, v in plain.items() if k != "strategy"}), "strategy"),
        (lambda plain: json.dumps({**plain, "strategy": {"amq": True}}), "p.json: .*amq"),
        (lambda plain: json.dumps({**plain, "table": [{"name": "x"}]}), "p.json is not a plan of fleetx"),
        (lambda plain: json.dumps({**plain, "measured": 3}), "p.json is not a plan of fleetx"),
        (lambda plain: json.dumps({**plain, "notes": None}), "p.json is not a plan of fleetx"),
        (lambda plain: json.dumps({**plain, "key": None}), "p.json is not a plan of fleetx"),
        (lambda plain: json.dumps({**plain, "strategy": None}), "p.json"),
    ],
)
def test_a_damaged_plan_is_one_clear_error(damage: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        from_json(damage(json.loads(to_json(a_plan()))), source="p.json")
    assert str(caught.value).count("p.json") == 1


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name in ("none.json", "bytes.json", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path / name)


def test_differences_of_keys_name_what_is_another() -> None:
    key = {"model": "ab", "ranks": 2, "asked": {"risk": "exact"}}
    assert differences(key, dict(key)) == []
    assert differences(key, {**key, "ranks": 4, "asked": {"risk": "lossy"}}) == [
        "ranks is 2, and was 4",
        "asked is {'risk': 'exact'}, and was {'risk': 'lossy'}",
    ]
    assert differences(key, {}) != []


def test_the_table_has_predicted_measured_memory_bytes_and_risk() -> None:
    lines = str(a_plan()).splitlines()
    assert lines[0] == "auto: fp32, recompute (planned in 7 s on CPU, 2 ranks)"
    assert re.split(r"\s{2,}", lines[1].strip()) == [
        "plan", "predicted ms", "measured", "samples/s", "predicted MiB", "measured", "MB sent", "risk",
    ]  # fmt: skip
    chosen, failed = (re.split(r"\s{2,}", line.strip()) for line in lines[2:4])
    assert chosen == ["*", "fp32, recompute", "36.4", "37.8", "423.3", "667.6", "666.6", "4.00", "exact"]
    assert failed[:3] == ["fp32, dgc 0.999", "82.0", "ran out of memory (on rank 1)"] and failed[-2:] == ["0.41", "lossy"]
    assert lines[4:] == ["  dgc: costs 9.4 ms.", "  a note."]
    assert str(replace(a_plan(), reused_from="p.json")) == "auto: fp32, recompute, by the plan in p.json."


def test_ranks_that_share_a_gpu_share_what_is_free_there() -> None:
    alone, shared = ("GPU-a", 90, 10), ("GPU-b", 80, 5)
    assert least_share([alone]) == 100
    assert least_share([alone, shared, shared]) == 80 // 2 + 5
    assert least_share([alone, ("GPU-b", 200, 5)]) == 100
