"""DistributedStrategy: closed, typed, and never silent about what it was given."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fleetx as X
from fleetx.config.kinds import Kind
from fleetx.engine.slots import Part, Slot
from fleetx.errors import ConfigError
from fleetx.strategies import catalogue
from fleetx.strategy import ELSEWHERE, DistributedStrategy

PARTS = sorted(catalogue())
PARTS_WITH_KEYS = [name for name in PARTS if dataclasses.fields(catalogue()[name])]


def message(action: Any, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


# Names and values


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_a_switch_that_starts_off(name: str) -> None:
    assert getattr(DistributedStrategy(), name) is False


@pytest.mark.parametrize("name", PARTS_WITH_KEYS)
def test_every_part_with_keys_has_its_settings_at_their_defaults(name: str) -> None:
    default = catalogue()[name]()
    expected = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    assert getattr(DistributedStrategy(), f"{name}_configs") == expected


def test_keywords_and_attributes_are_the_same() -> None:
    by_attribute = DistributedStrategy()
    by_attribute.lars = True
    by_attribute.lars_configs = {"lars_coeff": 0.01}
    assert DistributedStrategy(lars=True, lars_configs={"lars_coeff": 0.01}) == by_attribute


def test_setting_an_unknown_attribute_suggests_the_nearest() -> None:
    strategy = DistributedStrategy()
    text = message(lambda: setattr(strategy, "local_sgd", True))
    assert text == "DistributedStrategy has no setting `local_sgd`. Did you mean `localsgd`?"


def test_reading_an_unknown_attribute_suggests_the_nearest() -> None:
    text = message(lambda: DistributedStrategy().gradient_marge)
    assert text == "DistributedStrategy has no setting `gradient_marge`. Did you mean `gradient_merge`?"


def test_an_unknown_keyword_suggests_the_nearest() -> None:
    text = message(lambda: DistributedStrategy(larz=True))
    assert text == "DistributedStrategy has no setting `larz`. Did you mean `lars`?"


def test_an_unknown_attribute_without_a_near_name_lists_the_settings() -> None:
    text = message(lambda: DistributedStrategy(zzzzzz=True))
    assert text.startswith("DistributedStrategy has no setting `zzzzzz`. Its settings are: ")
    assert "dgc, fp16_allreduce, gradient_merge, lamb" in text and "gradient_merge_configs" not in text


def test_a_method_cannot_be_overwritten() -> None:
    assert "has no setting `copy`" in message(lambda: DistributedStrategy(copy=True))


def test_hasattr_is_false_for_an_unknown_name_instead_of_an_error() -> None:
    assert not hasattr(DistributedStrategy(), "larz")


def test_dir_lists_the_settings_for_completion() -> None:
    assert {"lars", "lars_configs", "fuse_grad_size_in_MB", "explain"} <= set(dir(DistributedStrategy()))


@pytest.mark.parametrize("value", [1, 0, "True", None])
def test_a_switch_is_true_or_false_and_nothing_else(value: Any) -> None:
    taken = "True, False, a dict of its settings, or fleetx.strategies.Lars(...)"
    assert message(lambda: DistributedStrategy(lars=value)) == f"lars is {value!r}; it must be {taken}."


@pytest.mark.parametrize("name", PARTS)
def test_a_switch_takes_true_a_dict_or_the_typed_part_and_the_three_mean_the_same(name: str) -> None:
    part, settings = catalogue()[name], catalogue()[name].neutral() or {}
    written = DistributedStrategy(**{name: True, **({f"{name}_configs": settings} if settings else {})})
    by_dict, by_part = DistributedStrategy(**{name: settings}), DistributedStrategy(**{name: part(**settings)})
    assert written == by_dict == by_part == DistributedStrategy.from_yaml(by_part.to_yaml())
    assert getattr(by_part, name) is True


def test_a_dict_or_a_part_says_all_settings_and_true_leaves_them() -> None:
    strategy = DistributedStrategy(gradient_merge_configs={"k_steps": 4})
    strategy.gradient_merge = True
    assert strategy.gradient_merge_configs == {"k_steps": 4, "avg": True}
    view = strategy.gradient_merge_configs
    strategy.gradient_merge = {"avg": False}
    assert view == {"k_steps": 1, "avg": False}
    strategy.gradient_merge = catalogue()["gradient_merge"](k_steps=2)
    assert view == {"k_steps": 2, "avg": True}


def test_a_refused_dict_leaves_the_switch_and_its_settings_as_they_were() -> None:
    strategy = DistributedStrategy()
    message(lambda: setattr(strategy, "gradient_merge", {"avg": False, "k_steps": 0}))
    assert strategy == DistributedStrategy()


def test_settings_given_twice_are_refused() -> None:
    text = message(lambda: DistributedStrategy(lars={"epsilon": 0.1}, lars_configs={"epsilon": 0.2}))
    assert text == "the settings of `lars` are given twice, in lars and in lars_configs. Keep one of them."


def test_settings_of_a_part_that_has_none_are_refused() -> None:
    text = message(lambda: DistributedStrategy(bf16_allreduce={"bits": 8}))
    assert text == "bf16_allreduce is {'bits': 8}; this strategy has no settings. Write bf16_allreduce=True."


def test_an_unknown_key_of_a_part_suggests_the_nearest_and_lists_the_valid_ones() -> None:
    text = message(lambda: X.strategies.GradientMerge(k_step=4))
    assert text == "GradientMerge has no key 'k_step'. Did you mean `k_steps`? Its keys are: k_steps, avg."
    assert message(lambda: X.strategies.BF16AllReduce(bits=8)) == "BF16AllReduce has no key 'bits'. It has no keys."


def test_the_parts_and_their_settings_are_public_by_name() -> None:
    classes = {part.__name__ for part in catalogue().values()}
    assert X.strategies.DGC is catalogue()["dgc"] and set(dir(X.strategies)) == {*classes, "catalogue"}
    assert set(X.strategies.DGCSettings.__annotations__) == {field.name for field in dataclasses.fields(X.strategies.DGC)}
    with pytest.raises(AttributeError, match="DGK"):
        X.strategies.DGK  # noqa: B018


def test_the_signature_names_every_keyword_for_notebooks_that_complete_them() -> None:
    parameters = inspect.signature(DistributedStrategy).parameters
    assert set(parameters) == set(DistributedStrategy()._values) and parameters["clip_norm_configs"].default == {"max_norm": 1.0}


def test_an_unknown_key_suggests_the_nearest_and_lists_the_valid_ones() -> None:
    text = message(lambda: DistributedStrategy(gradient_merge_configs={"k_step": 4}))
    assert text == "gradient_merge_configs has no key 'k_step'. Did you mean `k_steps`? Its keys are: k_steps, avg."


def test_a_key_that_is_not_text_is_an_unknown_key() -> None:
    assert "gradient_merge_configs has no key 3." in message(lambda: DistributedStrategy(gradient_merge_configs={3: 4}))


@pytest.mark.parametrize("value", [0, True, 2.0, "4", math.nan])
def test_a_wrong_value_names_key_value_and_what_is_allowed(value: Any) -> None:
    text = message(lambda: DistributedStrategy(gradient_merge_configs={"k_steps": value}))
    assert text == f'gradient_merge_configs["k_steps"] is {value!r}; it must be an integer of at least 1.'


def test_nan_is_refused_where_a_number_is_wanted() -> None:
    text = message(lambda: DistributedStrategy(lars_configs={"lars_coeff": math.nan}))
    assert text == 'lars_configs["lars_coeff"] is nan; it must be a finite number above 0.'


def test_settings_that_are_no_mapping_are_refused_with_the_keys() -> None:
    text = message(lambda: DistributedStrategy(gradient_merge_configs=4))
    assert text == "gradient_merge_configs is 4; it must be a dict with some of the keys: k_steps, avg."


def test_a_size_may_be_written_as_text() -> None:
    assert DistributedStrategy(recompute_configs={"budget": "20GB"}).recompute_configs["budget"] == 20_000_000_000


def test_an_integral_bucket_size_stays_an_integer() -> None:
    assert [repr(DistributedStrategy(fuse_grad_size_in_MB=size).fuse_grad_size_in_MB) for size in (16, 16.0, 0.5)] == [
        "16",
        "16",
        "0.5",
    ]


def test_a_bucket_size_of_nothing_is_refused() -> None:
    text = message(lambda: DistributedStrategy(fuse_grad_size_in_MB=0))
    assert text == "fuse_grad_size_in_MB is 0; it must be a finite number above 0."


# Settings as a live mapping


def test_keys_not_named_in_an_assignment_keep_their_value() -> None:
    strategy = DistributedStrategy(gradient_merge_configs={"k_steps": 4})
    strategy.gradient_merge_configs = {"avg": False}
    assert strategy.gradient_merge_configs == {"k_steps": 4, "avg": False}


def test_a_list_replaces_and_never_extends() -> None:
    strategy = DistributedStrategy(lars_configs={"exclude_from_weight_decay": ["a"]})
    strategy.lars_configs = {"exclude_from_weight_decay": ["b"]}
    assert strategy.to_dict()["lars_configs"]["exclude_from_weight_decay"] == ["b"]


@pytest.mark.parametrize("bad", [{"k_steps": 4, "avgg": True}, {"k_steps": 4, "avg": 1}])
def test_a_bad_key_or_value_leaves_everything_unchanged(bad: dict[str, Any]) -> None:
    strategy = DistributedStrategy()
    message(lambda: setattr(strategy, "gradient_merge_configs", bad))
    message(lambda: strategy.gradient_merge_configs.update(bad))
    assert strategy.gradient_merge_configs == {"k_steps": 1, "avg": True}


def test_a_single_key_can_be_written_through_the_mapping() -> None:
    strategy = DistributedStrategy()
    strategy.lars_configs["lars_coeff"] = 0.01
    assert strategy.lars_configs["lars_coeff"] == 0.01


def test_a_single_key_written_through_the_mapping_is_checked() -> None:
    settings = DistributedStrategy().lars_configs
    text = message(lambda: settings.__setitem__("lars_coeff", -1))
    assert text == 'lars_configs["lars_coeff"] is -1; it must be a finite number above 0.'


def test_reading_an_unknown_key_is_an_error_also_through_get() -> None:
    settings = DistributedStrategy().lars_configs
    assert "lars_configs has no key 'coeff'. Did you mean `lars_coeff`?" in message(lambda: settings["coeff"])
    assert "lars_configs has no key 'coeff'." in message(lambda: settings.get("coeff"))


def test_membership_answers_without_an_error() -> None:
    settings = DistributedStrategy().lars_configs
    assert "lars_coeff" in settings and "coeff" not in settings


@pytest.mark.parametrize("remove", [lambda s: s.pop("k_steps"), lambda s: s.clear(), lambda s: s.__delitem__("k_steps")])
def test_deleting_a_key_is_refused(remove: Any) -> None:
    strategy = DistributedStrategy()
    assert "gradient_merge_configs keeps all its keys" in message(lambda: remove(strategy.gradient_merge_configs))
    assert strategy.gradient_merge_configs == {"k_steps": 1, "avg": True}


def test_a_list_cannot_be_grown_behind_the_check() -> None:
    strategy = DistributedStrategy()
    with pytest.raises(ConfigError, match="Assign a new one"):
        strategy.lars_configs["exclude_from_weight_decay"].append(3)
    assert strategy == DistributedStrategy()


def test_the_list_a_user_passed_in_is_not_kept() -> None:
    layers = ["norm"]
    strategy = DistributedStrategy(lars_configs={"exclude_from_weight_decay": layers})
    layers.append("")
    assert strategy.lars_configs["exclude_from_weight_decay"] == ["norm"]


def test_settings_equal_the_dict_a_user_would_write_lists_included() -> None:
    assert DistributedStrategy().recompute_configs == {"checkpoints": [], "budget": None, "offload": False}


def test_settings_of_one_strategy_can_be_given_to_another_without_tying_them() -> None:
    one, other = DistributedStrategy(dgc_configs={"sparsity": [0.5]}), DistributedStrategy()
    other.dgc_configs = one.dgc_configs
    one.dgc_configs = {"sparsity": [0.75]}
    assert other.dgc_configs["sparsity"] == [0.5]


# Parts


def test_no_switch_means_no_parts() -> None:
    assert DistributedStrategy().parts() == []


@pytest.mark.parametrize("name", PARTS)
def test_a_switch_gives_its_part(name: str) -> None:
    (part,) = DistributedStrategy(**{name: True}).parts()
    assert type(part) is catalogue()[name]


def test_a_part_carries_its_settings() -> None:
    (part,) = DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4}).parts()
    assert part == catalogue()["gradient_merge"](k_steps=4, avg=True)  # type: ignore[call-arg]


def test_settings_before_the_switch_are_fine() -> None:
    strategy = DistributedStrategy(gradient_merge_configs={"k_steps": 4})
    strategy.gradient_merge = True
    assert [part.name for part in strategy.parts()] == ["gradient_merge"]


def test_settings_whose_switch_stays_off_are_not_dropped_in_silence() -> None:
    text = message(DistributedStrategy(gradient_merge_configs={"k_steps": 4}).parts)
    assert text == "gradient_merge_configs is set, but `gradient_merge` is off. Write `strategy.gradient_merge = True` to use it."


def test_localsgd_with_auto_is_the_older_spelling_of_adaptive_localsgd() -> None:
    strategy = DistributedStrategy(localsgd=True, auto=True)
    strategy.localsgd_configs = {"k_steps": 4, "begin_step": 7, "wire_dtype": "bfloat16", "outer_momentum": 0.9}
    adaptive = catalogue()["adaptive_localsgd"]
    expected = adaptive(init_k_steps=4, begin_step=7, wire_dtype="bfloat16", outer_momentum=0.9)  # type: ignore[call-arg]
    assert strategy.parts() == [expected]


@pytest.mark.parametrize("more", [{"gradient_merge": True}, {"auto_configs": {"trials": 9}}])
def test_localsgd_with_auto_and_more_is_kept_and_planned_around(more: dict[str, Any]) -> None:
    strategy = DistributedStrategy(localsgd=True, auto=True, localsgd_configs={"k_steps": 4}, **more)
    assert {"auto", "localsgd"} <= {part.name for part in strategy.parts()}
    assert "adaptive_localsgd" not in {part.name for part in strategy.parts()}


def test_auto_keeps_other_parts_with_their_settings() -> None:
    strategy = DistributedStrategy(auto=True, clip_norm=True, clip_norm_configs={"max_norm": 0.5})
    assert strategy.parts() == [catalogue()["auto"](), catalogue()["clip_norm"](max_norm=0.5)]  # type: ignore[call-arg]
    assert strategy.explain().endswith("\nauto: keeps clip_norm as set, and plans the rest.")


def test_auto_beside_both_spellings_of_localsgd_is_a_conflict() -> None:
    strategy = DistributedStrategy(auto=True, localsgd=True, adaptive_localsgd=True)
    claims = "both claim `shard`, both claim `reduce` and both claim `average`"
    assert f"adaptive_localsgd and localsgd {claims}" in strategy.explain()


@pytest.mark.parametrize("name", PARTS)
def test_the_neutral_setting_of_a_part_is_legal(name: str) -> None:
    part = catalogue()[name]
    assert isinstance(part(**(part.neutral() or {})), Part)


@pytest.mark.parametrize(
    ("name", "claims"),
    [
        ("recompute", {Slot.MODULE}),
        ("lars", {Slot.UPDATE, Slot.MOMENTUM}),
        ("lamb", {Slot.UPDATE, Slot.MOMENTUM}),
        ("muon", {Slot.UPDATE, Slot.MOMENTUM}),
        ("localsgd", {Slot.SHARD, Slot.REDUCE, Slot.AVERAGE}),
        ("adaptive_localsgd", {Slot.SHARD, Slot.REDUCE, Slot.AVERAGE}),
        ("powersgd", {Slot.REDUCE}),
        ("quantized_allreduce", {Slot.REDUCE}),
        ("sharding", {Slot.SHARD}),
        ("auto", set()),
    ],
)
def test_the_claims_are_those_of_the_design(name: str, claims: set[Slot]) -> None:
    assert catalogue()[name]().claims() == claims


# Copies


@pytest.mark.parametrize("duplicate", [DistributedStrategy.copy, copy.copy, copy.deepcopy])
def test_a_copy_is_equal_and_independent(duplicate: Any) -> None:
    strategy = DistributedStrategy(lars=True, lars_configs={"lars_coeff": 0.01})
    twin = duplicate(strategy)
    assert twin == strategy
    twin.lars_configs["lars_coeff"] = 0.02
    twin.lars = False
    assert strategy == DistributedStrategy(lars=True, lars_configs={"lars_coeff": 0.01})


def test_a_strategy_is_not_equal_to_its_dict() -> None:
    assert DistributedStrategy() != DistributedStrategy().to_dict()


def test_strategies_with_different_settings_are_unequal() -> None:
    assert DistributedStrategy(lars_configs={"epsilon": 1.0}) != DistributedStrategy()


# Files

# Letters that YAML, JSON or a table could trip over. Hypothesis's own alphabet takes seconds to set up.
TRICKY = "ab10. -_~:#,&*!|>%@?'\"\\/[]{}=\n\r\t\x00\x1b\x85\xa0\u2028\ufeffé中😀"


def accepted(kind: Kind, value: Any) -> bool:
    try:
        kind.parse(value)
    except ValueError:
        return False
    return True


def legal_values(kind: Kind) -> st.SearchStrategy[Any]:
    """Values that a kind accepts, found by asking it: a new part is covered without a word here."""
    words = re.findall(r"'([^']+)'", kind.allowed)
    pool = [
        v
        for v in [True, False, None, 1, 7, 8, 64, 0.25, 1.5, 3e-5, [], ["norm"], [0.5, 0.75], [0.5, 1, 2], "20GB", *words]
        if accepted(kind, v)
    ]
    options: list[st.SearchStrategy[Any]] = [st.sampled_from(pool)]
    if accepted(kind, 7):
        options.append(st.integers(7, 2**53).filter(lambda value: accepted(kind, value)))
    if accepted(kind, 0.25):
        options.append(st.floats(1e-300, 0.999))
    if accepted(kind, ["norm"]):
        options.append(st.lists(st.text(TRICKY, min_size=1), max_size=3))
    return st.one_of(options)


@st.composite
def strategies(draw: st.DrawFn) -> DistributedStrategy:
    strategy = DistributedStrategy(
        fuse_grad_size_in_MB=draw(st.one_of(st.integers(1, 512), st.floats(0.1, 512))),
        find_unused_parameters=draw(st.booleans()),
        local_buffers=draw(st.lists(st.text(TRICKY, min_size=1), max_size=3)),
    )
    for name in draw(st.lists(st.sampled_from(PARTS), unique=True, max_size=4)):
        setattr(strategy, name, draw(st.booleans()))
        for field in dataclasses.fields(catalogue()[name]):
            if draw(st.booleans()):
                getattr(strategy, f"{name}_configs")[field.name] = draw(legal_values(field.metadata["kind"]))
    return strategy


@given(strategies())
def test_every_legal_strategy_survives_json(strategy: DistributedStrategy) -> None:
    assert DistributedStrategy.from_json(strategy.to_json()) == strategy


@given(strategies())
def test_every_legal_strategy_survives_yaml(strategy: DistributedStrategy) -> None:
    assert DistributedStrategy.from_yaml(strategy.to_yaml()) == strategy


@given(strategies())
def test_the_short_form_is_python_that_makes_the_same_strategy(strategy: DistributedStrategy) -> None:
    call = ast.parse(repr(strategy), mode="eval").body
    assert isinstance(call, ast.Call)
    assert DistributedStrategy(**{word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}) == strategy


def test_the_short_form_names_only_what_differs_from_the_defaults() -> None:
    strategy = DistributedStrategy(amp=True, gradient_merge={"k_steps": 4}, on_nan_inf="skip")
    assert repr(strategy) == "DistributedStrategy(amp=True, gradient_merge={'k_steps': 4}, on_nan_inf='skip')"
    assert repr(DistributedStrategy()) == "DistributedStrategy()"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("gradient_accumulation_steps", "gradient_merge"), ("fp16", "amp"), ("zero", "sharding"), ("max_grad_norm", "clip_norm")],
)
def test_the_word_of_another_library_is_answered_with_ours(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"has no setting `{theirs}`. Here it is called `{ours}`."):
        DistributedStrategy.from_dict({theirs: True})


def test_words_of_other_libraries_name_switches_that_are_there() -> None:
    assert set(ELSEWHERE) <= set(catalogue())
    assert not set().union(*ELSEWHERE.values()) & set(DistributedStrategy()._values)


@given(strategies())
def test_every_row_of_the_overview_has_the_same_width(strategy: DistributedStrategy) -> None:
    assert {len(line) for line in str(strategy).split("\n")} == {84}


def test_a_dict_holds_what_is_on_with_all_its_settings_and_the_scalars() -> None:
    assert DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4}).to_dict() == {
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 4, "avg": True},
        "fuse_grad_size_in_MB": 32,
        "find_unused_parameters": False,
        "local_buffers": [],
        "on_nan_inf": "stop",
        "desync_check_steps": 100,
        "noise_scale_steps": 0,
    }


def test_a_list_that_is_a_setting_of_its_own_is_replaced_and_never_changed_in_place() -> None:
    strategy = DistributedStrategy(local_buffers=["hidden"])
    with pytest.raises(ConfigError, match=r"not changed in place. Assign a new one: strategy.x = \[...\]"):
        strategy.local_buffers.append("memory.*")
    strategy.to_dict()["local_buffers"].append("memory.*")
    assert strategy.local_buffers == ["hidden"] and DistributedStrategy().local_buffers == []
    with pytest.raises(ConfigError, match=r"local_buffers is 'hidden'; it must be a list of non-empty strings"):
        strategy.local_buffers = "hidden"


def test_changing_the_dict_does_not_change_the_strategy() -> None:
    strategy = DistributedStrategy(lars=True)
    strategy.to_dict()["lars_configs"]["exclude_from_weight_decay"].append(3)
    assert strategy == DistributedStrategy(lars=True)


def test_lists_are_lists_in_json() -> None:
    assert json.loads(DistributedStrategy(lars=True).to_json())["lars_configs"]["exclude_from_weight_decay"] == ["norm", "bias"]


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml", ".YAML"])
def test_a_saved_strategy_loads_by_its_suffix(tmp_path: Path, suffix: str) -> None:
    strategy = DistributedStrategy(lars=True, lars_configs={"lars_coeff": 1e-5})
    strategy.save(tmp_path / f"strategy{suffix}")
    assert DistributedStrategy.load(tmp_path / f"strategy{suffix}") == strategy


def test_a_file_of_another_kind_is_refused_before_it_is_written(tmp_path: Path) -> None:
    text = message(lambda: DistributedStrategy().save(tmp_path / "strategy.toml"))
    assert text.endswith("strategy.toml ends in '.toml'; a strategy file ends in .json, .yaml or .yml.")
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("larz: true\n")
    assert message(lambda: DistributedStrategy.load(tmp_path / "run.yaml")).endswith(
        "run.yaml: DistributedStrategy has no setting `larz`. Did you mean `lars`?"
    )


def test_a_file_that_is_no_text_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\xff\xfe\x00")
    assert "run.json is not UTF-8 text" in message(lambda: DistributedStrategy.load(tmp_path / "run.json"))


def test_a_number_in_yaml_needs_no_dot_before_its_exponent() -> None:
    assert DistributedStrategy.from_yaml("lars_configs: {lars_coeff: 1e-3}").lars_configs["lars_coeff"] == 0.001


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lars: true\nlars: false\n", "'lars' is given twice"),
        ("lars_configs: {epsilon: 0, epsilon: 1}\n", "'epsilon' is given twice"),
        ("a: &x [1, 2]\nb: *x\n", "aliases are not allowed"),
        ("<<: {lars: true}\nlars: false\n", "merge keys are not allowed"),
        ("!!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("lars: true\n---\nlars: false\n", "expected a single document"),
        ("lars: [\n", "This is not a strategy in YAML"),
        ("[" * 5000, "This is not a strategy in YAML"),
        ("lars: !!timestamp soon\n", "This is not a strategy in YAML"),
        ("- lars\n", "A strategy is a mapping of settings, such as {'amp': True}; this is ['lars']."),
        ("", "this is None."),
        ("1: true\n", "DistributedStrategy has no setting `1`."),
        ("lars_configs: {epsilon: .nan}\n", 'lars_configs["epsilon"] is nan; it must be a finite number at least 0.'),
    ],
)
def test_yaml_that_is_no_strategy_is_refused_with_its_reason(text: str, reason: str) -> None:
    assert reason in message(lambda: DistributedStrategy.from_yaml(text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"lars": true, "lars": false}', "'lars' is given twice"),
        ('{"fuse_grad_size_in_MB": NaN}', "NaN is not a number that can be used"),
        ('{"fuse_grad_size_in_MB": -Infinity}', "-Infinity is not a number that can be used"),
        ('{"fuse_grad_size_in_MB": 1e999}', "fuse_grad_size_in_MB is inf; it must be a finite number above 0."),
        ("[]", "A strategy is a mapping of settings"),
        ("{", "This is not a strategy in JSON"),
        ("[" * 100_000, "This is not a strategy in JSON"),
    ],
)
def test_json_that_is_no_strategy_is_refused_with_its_reason(text: str, reason: str) -> None:
    assert reason in message(lambda: DistributedStrategy.from_json(text))


# Tables


def test_the_overview_has_the_rows_of_the_seed_document() -> None:
    table = str(DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4}))
    assert table.startswith(
        """\
    +==============================================================================+
    |                                                                              |
    |                         DistributedStrategy Overview                         |
    |                                                                              |
    +==============================================================================+
    |                gradient_merge=True <-> gradient_merge_configs                |
    +------------------------------------------------------------------------------+
    |                               k_steps                    4                   |
    |                                   avg                   True                 |
    +==============================================================================+
    |                             Communication Flags                              |
    +------------------------------------------------------------------------------+
    |                  fuse_grad_size_in_MB                    32                  |
"""
    )


def test_the_overview_gives_each_element_of_a_list_a_row_of_its_own() -> None:
    table = str(DistributedStrategy(lars=True))
    first, second = (next(line for line in table.split("\n") if word in line) for word in (" norm ", " bias "))
    assert "exclude_from_weight_decay" in first and second.split() == ["|", "bias", "|"]


def test_the_overview_shows_settings_whose_switch_is_off() -> None:
    assert "lars=False <-> lars_configs" in str(DistributedStrategy(lars_configs={"epsilon": 1.0}))


def test_the_overview_cuts_a_long_name_instead_of_breaking_the_frame() -> None:
    table = str(DistributedStrategy(recompute=True, recompute_configs={"checkpoints": ["x" * 60]}))
    assert [line.count("x") for line in table.split("\n") if "xx" in line] == [38, 22]


def test_a_plain_strategy_explains_every_slot() -> None:
    assert DistributedStrategy().explain().split("\n") == [
        "slot      filled by",
        "module    none",
        "shard     none",
        "forward   plain",
        "backward  plain",
        "merge     none",
        "reduce    dense all-reduce",
        "clip      none",
        "momentum  your optimizer",
        "update    your optimizer",
        "average   none",
    ]


def test_explain_shows_only_the_settings_that_differ_from_the_default() -> None:
    table = DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 4}).explain()
    assert "merge     gradient_merge (k_steps=4)" in table.split("\n")


def test_explain_reports_every_conflict_with_its_slot_and_reasons() -> None:
    table = DistributedStrategy(dgc=True, lars=True, powersgd=True).explain()
    conflicts = [line for line in table.split("\n") if line.startswith("Conflict: ")]
    assert [line.split(".")[0] for line in conflicts] == [
        "Conflict: dgc and powersgd both claim `reduce`",
        "Conflict: dgc and lars both claim `momentum`",
    ]
    assert all("DGC applies momentum" in line and line.endswith("Keep one of them.") for line in conflicts)


def test_parts_that_share_several_slots_are_told_once() -> None:
    table = DistributedStrategy(lars=True, lamb=True).explain()
    (conflict,) = [line for line in table.split("\n") if line.startswith("Conflict: ")]
    assert conflict.startswith("Conflict: lamb and lars both claim `momentum` and both claim `update`. LAMB scales ")
    assert conflict.count("LARS scales ") == 1 and conflict.endswith(" Keep one of them.")


def test_explain_lists_a_part_that_claims_no_slot() -> None:
    assert "no slot   auto" in DistributedStrategy(auto=True).explain().split("\n")
