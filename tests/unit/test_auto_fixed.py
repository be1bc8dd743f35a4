"""`auto` beside parts that the user has set: they stay as they are, and bound what may be chosen. From measures made up here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from fleetx.auto.candidate import DENSE, Candidate, every, offered
from fleetx.auto.cost import Gradients, Reducer, Rung, wire
from fleetx.auto.explain import rejected
from fleetx.auto.fixed_parts import NOTHING, Fixed
from fleetx.auto.link import LinkProfile
from fleetx.auto.measurements import Forecast, Measured, Pass, Reduced, forecast
from fleetx.auto.plan import Plan, Row, differences, from_json, to_json
from fleetx.auto.probe import computed_again
from fleetx.auto.request import Asked
from fleetx.auto.run_measurements import gradients_of
from fleetx.auto.what_if import Question, candidate_of, curves, same_plan, what_if
from fleetx.cli.planning import how_to_use
from fleetx.dist.predicted_cost import Link, low_rank, sparse
from fleetx.engine.slots import PlanContext, Risk
from fleetx.errors import ConfigError
from fleetx.recompute.profile import Element, Profile, Way
from fleetx.strategies import catalogue
from fleetx.strategies.auto import Auto
from fleetx.strategy import DistributedStrategy

MB = 10**6
POINTS = ((1e6, 1e-3), (4e6, 4e-3), (16e6, 16e-3))
PASS = Pass("float32", 8, 0.010, 0.020, (Rung(1000 * MB, 0.0, 0), Rung(500 * MB, 0.009, 5)))


def measured(*reducers: Reducer, passes: tuple[Pass, ...] = (PASS,)) -> Measured:
    """Two ranks, 1 GB/s, 4 MB of gradients; every exchange takes 4 ms, the optimizer's step 2."""
    reduced = tuple(Reduced(one.every_update(), 0.006, 4e6, 0, 300 * MB) for one in reducers)
    link = LinkProfile(2, POINTS, POINTS)
    return Measured("CPU", link, Gradients(((1000, 500), (400_000,), *[(10_000,)] * 10)), 0.002, passes, reduced)


ALL = measured(*offered(PlanContext(ranks=2)))


def fixed(**settings: Any) -> Fixed:
    return Fixed.of(DistributedStrategy(**settings).parts())


# --- the parts --------------------------------------------------------------------------------------------------------------


def test_auto_itself_is_no_part_to_keep() -> None:
    assert Fixed.of(DistributedStrategy(auto=True, clip_norm=True).parts()).names == ("clip_norm",)


@pytest.mark.parametrize("name", [name for name in catalogue() if name != "auto"])
def test_every_part_comes_back_from_the_settings_that_a_plan_has_of_it(name: str) -> None:
    found = fixed(**{name: True})
    assert Fixed.from_settings(json.loads(json.dumps(found.settings))) == found
    assert DistributedStrategy(**found.settings).parts() == list(found.parts)


def test_a_part_that_claims_the_same_slot_is_refused_with_both_names() -> None:
    clip = fixed(clip_norm=True)
    assert clip.refusal("dgc") == "clip_norm, which you set, claims `clip`."
    assert clip.refusal("powersgd") is None and NOTHING.refusal("dgc") is None
    assert fixed(lamb=True).refusal("dgc") == "lamb, which you set, claims `momentum`."
    assert fixed(bf16_allreduce=True).refusal("localsgd") == "bf16_allreduce, which you set, claims `reduce`."


def test_what_is_set_is_no_longer_chosen() -> None:
    assert fixed(amp=True, amp_configs={"dtype": "float16"}).precision == "float16"
    assert fixed(gradient_merge=True, gradient_merge_configs={"k_steps": 4}).merge_steps == 4
    assert fixed(dgc=True, dgc_configs={"sparsity": [0.9, 0.99]}).reducer == Reducer.named("dgc", 0.99)
    assert fixed(powersgd=True, powersgd_configs={"rank": 2}).reducer == Reducer.named("powersgd", 2)
    assert fixed(localsgd=True, localsgd_configs={"k_steps": 8}).reducer == Reducer.named("localsgd", 8)
    assert fixed(adaptive_localsgd=True).reducer == Reducer.named("adaptive_localsgd", 1)
    assert fixed(fp16_allreduce=True).reducer == Reducer.named("fp16_allreduce")
    free = fixed(clip_norm=True, lars=True, sync_batch_norm=True)
    assert (free.precision, free.merge_steps, free.reducer, free.recompute) == (None, None, None, None)


# --- while it is timed ------------------------------------------------------------------------------------------------------


def timed(given: dict[str, Any], settings: dict[str, Any], *, recomputes: bool = True) -> DistributedStrategy:
    return DistributedStrategy(**fixed(**given).timed(settings, recomputes=recomputes))


def test_a_part_is_timed_with_its_own_settings_beside_what_is_tried() -> None:
    found = timed({"clip_norm": True, "clip_norm_configs": {"max_norm": 0.5}}, Candidate("bfloat16").settings())
    assert found.amp and found.clip_norm and found.clip_norm_configs["max_norm"] == 0.5


def test_few_micro_steps_and_short_periods_are_timed_of_long_ones() -> None:
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 64, "avg": False}}
    found = timed(merge, Candidate(merge_steps=3).settings())
    assert found.gradient_merge_configs == {"k_steps": 3, "avg": False}
    local = {"localsgd": True, "localsgd_configs": {"k_steps": 16, "begin_step": 900, "overlap_steps": 9, "outer_momentum": 0.5}}
    found = timed(local, Candidate(reducer=Reducer.named("localsgd", 2)).settings())
    configs = found.localsgd_configs
    assert (configs["k_steps"], configs["begin_step"], configs["overlap_steps"], configs["outer_momentum"]) == (2, 1, 1, 0.5)


def test_what_a_compressor_leaves_dense_at_the_start_is_not_what_is_timed() -> None:
    found = timed({"dgc": True, "dgc_configs": {"sparsity": [0.75, 0.99], "rampup_begin_step": 50, "min_numel": 7}}, {})
    configs = found.dgc_configs
    assert (configs["sparsity"], configs["rampup_begin_step"], configs["min_numel"]) == ([0.99], 0, 7)
    assert timed({"powersgd": True}, {}).powersgd_configs["begin_step"] == 0


def test_passes_are_measured_with_nothing_computed_again_and_updates_with_all_that_is_set() -> None:
    given = {"recompute": True, "recompute_configs": {"checkpoints": ["0"]}}
    assert not timed(given, {}, recomputes=False).recompute
    assert timed(given, {}).recompute_configs["checkpoints"] == ["0"]


def test_what_compressors_take_is_counted_by_the_settings_of_the_user() -> None:
    gradients, link = gradients_of([torch.zeros(128, 128), torch.zeros(64)]), Link(2, 1e9)
    small = fixed(dgc=True, dgc_configs={"min_numel": 64}).reducer
    thick = fixed(powersgd=True, powersgd_configs={"rank": 64}).reducer
    assert small is not None and thick is not None
    assert wire(small, gradients, link) == sparse(16384 + 64, link, sparsity=0.999)
    assert wire(thick, gradients, link) == low_rank([], link, rank=64, dense_numel=16384 + 64)


# --- candidates -------------------------------------------------------------------------------------------------------------


def test_risk_binds_what_is_added_and_not_what_was_set() -> None:
    bf16 = Candidate("bfloat16", 8, reducer=Reducer.named("localsgd", 8), kept=("localsgd",))
    assert bf16.risk == Risk.ROUNDING and replace(bf16, kept=("localsgd", "amp")).risk == Risk.EXACT
    batches, reducers = [(8, 4)], [Reducer.named("dgc", 0.999)]
    found = list(every(["float32"], batches, reducers, own_batch=True, risk="exact", kept=("dgc", "gradient_merge")))
    assert [(one.merge_steps, one.reducer.kind, one.risk) for one in found] == [(4, "dgc", Risk.EXACT)]
    assert not list(every(["float32"], batches, reducers, own_batch=True, risk="exact", kept=("dgc",)))  # merging is added


def test_micro_batches_are_as_gradient_merge_was_set() -> None:
    auto = Auto(risk="schedule")
    assert Asked(auto, None, None, 4).batches(8) == [(8, 4)]
    assert Asked(auto, None, 24, 4).batches(8) == [(6, 4)]
    assert len(Asked(auto, None, 24).batches(8)) > 1


def test_units_that_were_named_are_one_plan_whose_peak_and_time_follow_from_the_profile() -> None:
    sizes, elements, given = {0: 0}, list[Element](), 0
    for unit, again_s in enumerate((1.0, 2.0)):
        inner, out = 2 * unit + 1, 2 * unit + 2
        sizes |= {inner: 100, out: 10}
        kept = Way(frozenset({given, inner}), 110, 0)
        elements.append(Element(unit, kept, Way(frozenset({given}), 110, 100, again_s)))
        given = out
    elements.append(Element(None, Way(frozenset({given}), 0, 0)))
    found = computed_again(Profile(("a", "b"), tuple(elements), sizes, 0), offload=False)
    assert found.again == {0, 1} and found.seconds == 3.0 and not found.offloads
    assert found.peak_bytes < 220  # both stored


# --- words ------------------------------------------------------------------------------------------------------------------


def sentences(kept: Fixed, chosen: Candidate) -> dict[str, str]:
    told = forecast(ALL, replace(chosen, kept=kept.names))
    assert isinstance(told, Forecast)
    return rejected(ALL, told, risk="schedule", memory=None, asked_batch=False, rules={}, ran={}, fixed=kept)


def test_what_cannot_stand_beside_a_part_is_told_with_its_slot() -> None:
    found = sentences(fixed(clip_norm=True), Candidate("float32", 8))
    assert found["dgc"] == "clip_norm, which you set, claims `clip`."
    assert "which you set" not in " ".join(text for name, text in found.items() if name != "dgc")


def test_a_part_that_was_set_is_not_told_as_rejected() -> None:
    kept = fixed(amp=True, recompute=True, gradient_merge=True, bf16_allreduce=True)
    found = sentences(kept, Candidate("float32", 8, reducer=Reducer.named("bf16_allreduce")))
    assert set(found) == {"powersgd", "dgc", "quantized_allreduce", "localsgd", "fp16_allreduce", "adaptive_localsgd"}
    assert set(found.values()) == {"bf16_allreduce, which you set, claims `reduce`."}


# --- the plan ---------------------------------------------------------------------------------------------------------------


def a_plan(**settings: Any) -> Plan:
    strategy, kept = DistributedStrategy(**settings), fixed(**settings)
    row = Row("fp32", "exact", 0.03, 0.03, 16, 1000 * MB, 1000 * MB, 4e6)
    return Plan(strategy, "fp32", (row,), {}, {"ranks": 2, "fixed": kept.settings}, 0, 1, ALL)


def test_a_plan_says_what_it_kept_and_what_to_write() -> None:
    plan = a_plan(clip_norm=True, clip_norm_configs={"max_norm": 0.5}, lars=True)
    assert "\n  kept: clip_norm (max_norm=0.5), lars" in str(plan)
    assert "clip_norm=True, clip_norm_configs={'max_norm': 0.5}" in how_to_use(plan)
    again = from_json(to_json(plan), source="plan.json")
    assert again.fixed == plan.fixed and "Kept: clip_norm (max_norm=0.5), lars." in str(again)
    assert "kept" not in str(a_plan()).lower()


def test_a_plan_for_other_parts_is_another_plan() -> None:
    wanted, found = a_plan(clip_norm=True).key, a_plan().key
    assert differences(wanted, found) == ["fixed is {'clip_norm': True, 'clip_norm_configs': {'max_norm': 1.0}}, and was {}"]
    assert differences(found, wanted) and differences(found, {"ranks": 2})


def test_a_plan_file_with_unknown_parts_is_one_clear_error() -> None:
    plain = json.loads(to_json(a_plan()))
    plain["key"]["fixed"] = {"clip_nrom": True}
    with pytest.raises(ConfigError, match=r"p.json: .*clip_nrom"):
        from_json(json.dumps(plain), source="p.json")


# --- what if ----------------------------------------------------------------------------------------------------------------


def test_other_links_and_ranks_keep_what_was_set() -> None:
    question = Question("schedule", world=64)
    clip = what_if(ALL, question, fixed(clip_norm=True))
    kinds = {one.candidate.reducer.kind for one in clip.forecasts}
    assert "dgc" not in kinds and {"dense", "powersgd", "localsgd"} <= kinds
    one = what_if(ALL, replace(question, risk="exact"), fixed(powersgd=True))
    assert {found.candidate.reducer for found in one.forecasts} == {Reducer.named("powersgd", 4)}
    merged = what_if(ALL, question, fixed(gradient_merge=True, gradient_merge_configs={"k_steps": 3}))
    assert {found.candidate.merge_steps for found in merged.forecasts} == {3}
    base = Candidate(batch=8, reducer=Reducer.named("bf16_allreduce"))
    assert [found.name for found in curves(ALL, base, question, fixed=fixed(bf16_allreduce=True))] == ["bf16_allreduce"]


def test_a_global_batch_that_the_users_merging_does_not_make_up_is_refused() -> None:
    merge = fixed(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    assert what_if(ALL, Question("exact", global_batch=48), merge).chosen.candidate.merge_steps == 3
    with pytest.raises(ConfigError, match="by 3 micro-steps, as gradient_merge is set to"):
        what_if(ALL, Question("exact", global_batch=64), merge)


def test_a_plan_is_found_again_among_its_own_candidates() -> None:
    settings = {"amp": True, "localsgd": True, "localsgd_configs": {"k_steps": 8}, "gradient_merge": True}
    settings["gradient_merge_configs"] = {"k_steps": 2}
    reducer, passes = Reducer.named("localsgd", 8), (replace(PASS, precision="bfloat16"),)
    plan = replace(a_plan(**settings), measured=measured(reducer, passes=passes), merge_steps=2)
    base = candidate_of(plan)
    assert (base.precision, base.merge_steps, base.reducer, base.grows_batch) == ("bfloat16", 2, reducer, False)
    assert base.risk == Risk.EXACT
    outlook = what_if(plan.measured, Question("exact"), plan.fixed)
    assert same_plan(outlook, base) is outlook.chosen
    assert outlook.chosen.candidate.reducer != DENSE
