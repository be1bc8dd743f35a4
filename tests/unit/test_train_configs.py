"""parse_train_configs: our flags and every key of the strategy, checked; the rest is the caller's, untouched."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx.cli.train_configs import OWN, TrainConfigs, accepts, parse_train_configs, scalar
from fleetx.config.kinds import Kind
from fleetx.errors import ConfigError
from fleetx.strategies import catalogue
from fleetx.strategy import SCALARS, DistributedStrategy

PARTS = sorted(catalogue())


def parse(*words: str, **defaults: Any) -> TrainConfigs:
    return parse_train_configs(list(words), defaults=defaults)


def refusal(*words: str, **defaults: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*words, **defaults)
    return str(caught.value)


# Our own names


def test_without_flags_the_values_are_fleets() -> None:
    configs = parse()
    assert {name: getattr(configs, name) for name in OWN} == {
        "lr": 1e-4,
        "momentum": 0.9,
        "beta1": 0.9,
        "beta2": 0.997,
        "epsilon": 1e-9,
        "batch_size": 32,
        "epochs": 1,
        "data": None,
        "resume": None,
    }
    assert configs.strategy == DistributedStrategy() and configs.rest == []


def test_both_spellings_of_a_value_and_of_a_name_are_read() -> None:
    configs = parse("--lr", "0.5", "--batch-size=64", "--beta1=0", "--epochs", "90", "--data", "digits")
    assert (configs.lr, configs.batch_size, configs.beta1, configs.epochs, configs.data) == (0.5, 64, 0.0, 90, "digits")
    assert type(configs.batch_size) is int and type(configs.beta1) is float


def test_a_repeated_flag_has_its_last_value() -> None:
    assert parse("--lr", "0.5", "--lr=0.25").lr == 0.25


def test_a_script_has_defaults_of_its_own_and_flags_come_before_them() -> None:
    configs = parse("--lr", "0.5", lr=0.1, epochs=3, data=None)
    assert (configs.lr, configs.epochs, configs.data) == (0.5, 3, None)


def test_the_command_line_is_read_when_nothing_is_given_and_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.5", "--mine", "--amp"])
    before = list(sys.argv)
    configs = parse_train_configs()
    assert (configs.lr, configs.rest, configs.strategy.amp) == (0.5, ["--mine"], True)
    assert sys.argv == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lr", "0"], "--lr is '0'; it must be a finite number above 0."),
        (["--lr=-0.1"], "--lr is '-0.1'; it must be a finite number above 0."),
        (["--lr", "nan"], "--lr is 'nan'; it must be a finite number above 0."),
        (["--lr", "1e999"], "--lr is '1e999'; it must be a finite number above 0."),
        (["--lr", "true"], "--lr is 'true'; it must be a finite number above 0."),
        (["--lr", "1:30"], "--lr is '1:30'; it must be a finite number above 0."),
        (["--lr", ""], "--lr is ''; it must be a finite number above 0."),
        (["--momentum", "1"], "--momentum is '1'; it must be a finite number at least 0 and below 1."),
        (["--batch-size", "2.5"], "--batch-size is '2.5'; it must be an integer of at least 1."),
        (["--batch_size", "٣"], "--batch_size is '٣'; it must be an integer of at least 1."),
        (["--epochs", "0"], "--epochs is '0'; it must be an integer of at least 1."),
        (["--lr"], "--lr needs a value: a finite number above 0."),
        (["--lr", "--amp"], "--lr needs a value: a finite number above 0."),
        (["--data="], "--data is ''; it must be a folder, a file, or the name of built-in data."),
        (["--lars.lars_coeff", "big"], "--lars.lars_coeff is 'big'; it must be a finite number above 0."),
        (["--amp.dtype", "float8"], "--amp.dtype is 'float8'; it must be None or one of 'bfloat16', 'float16'."),
        (["--desync_check_steps", "-1"], "--desync_check_steps is '-1'; it must be an integer of at least 0."),
    ],
)
def test_a_bad_value_names_its_flag_and_what_is_allowed(words: list[str], told: str) -> None:
    assert refusal(*words) == told


def test_a_number_of_many_digits_is_refused_as_any_other() -> None:
    assert refusal("--batch_size", "9" * 5000).startswith("--batch_size is '9999")


@pytest.mark.parametrize(
    ("defaults", "told"),
    [
        ({"learning_rate": 0.1}, "defaults has no 'learning_rate'."),
        ({"batchsize": 1}, "defaults has no 'batchsize'. Did you mean `batch_size`?"),
        ({"lr": True}, 'defaults["lr"] is True; it must be a finite number above 0.'),
        ({"lr": None}, 'defaults["lr"] is None; it must be a finite number above 0.'),
        ({"strategy": {"amp": True}}, "defaults[\"strategy\"] is {'amp': True}; it must be a DistributedStrategy."),
    ],
)
def test_bad_defaults_are_refused(defaults: dict[str, Any], told: str) -> None:
    assert told in refusal(**defaults)


@pytest.mark.parametrize("argv", ["--lr 0.1", ["--lr", 0.1], {"lr": 0.1}])
def test_arguments_that_are_no_list_of_words_are_refused(argv: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a list of words"):
        parse_train_configs(argv)


def test_resume_has_a_folder_of_its_own_when_none_is_named() -> None:
    assert parse("--resume").resume == "checkpoints"
    assert parse("--resume", "--amp").resume == "checkpoints"
    assert parse("--resume", "runs/3").resume == parse("--resume=runs/3").resume == "runs/3"


# The strategy


def test_a_key_of_a_part_switches_the_part_on() -> None:
    strategy = parse("--gradient_merge.k_steps", "4", "--lars.lars-coeff=0.01").strategy
    expected = DistributedStrategy(gradient_merge=True, lars=True, lars_configs={"lars_coeff": 0.01})
    expected.gradient_merge_configs["k_steps"] = 4
    assert strategy == expected


@pytest.mark.parametrize("words", [["--amp"], ["--amp", "true"], ["--amp=True"], ["--amp", "false", "--amp"]])
def test_a_switch_may_stand_alone_or_with_a_value(words: list[str]) -> None:
    assert parse(*words, "--lr", "1").strategy == DistributedStrategy(amp=True)


def test_a_switch_takes_no_word_that_is_the_callers() -> None:
    configs = parse("--amp", "train.txt")
    assert (configs.strategy.amp, configs.rest) == (True, ["train.txt"])


@pytest.mark.parametrize("word", ["yes", "off", "0", "TRUE", "None"])
def test_a_word_that_is_almost_true_or_false_is_refused_after_a_switch(word: str) -> None:
    assert refusal("--amp", word) == f"--amp is followed by {word!r}; write --amp true or --amp false."


def test_scalars_and_none_and_words_that_yaml_would_turn_into_booleans_are_read() -> None:
    strategy = parse(
        "--fuse_grad_size_in_MB", "16", "--on-nan-inf", "off", "--recompute.budget", "20GB", "--amp.dtype=null"
    ).strategy
    assert (strategy.fuse_grad_size_in_MB, strategy.on_nan_inf) == (16, "off")
    assert (strategy.recompute_configs["budget"], strategy.amp_configs["dtype"], strategy.amp) == (20_000_000_000, None, True)


@pytest.mark.parametrize(
    "text", ["batch_norm,.b_0", "batch_norm, .b_0", "[batch_norm, .b_0]", '["batch_norm", ".b_0"]', "['batch_norm', '.b_0']"]
)
def test_a_list_is_written_in_any_usual_way(text: str) -> None:
    strategy = parse("--lars.exclude_from_weight_decay", text).strategy
    assert strategy.lars_configs["exclude_from_weight_decay"] == ["batch_norm", ".b_0"]


def test_a_list_may_be_empty_or_hold_one_or_hold_numbers() -> None:
    assert parse("--lars.exclude_from_weight_decay=[]").strategy.lars_configs["exclude_from_weight_decay"] == []
    assert parse("--lars.exclude_from_weight_decay=1").strategy.lars_configs["exclude_from_weight_decay"] == ["1"]
    assert parse("--dgc.sparsity", "0.75,0.9").strategy.dgc_configs["sparsity"] == [0.75, 0.9]
    assert parse("--dgc.sparsity", "[0.75, 9e-1]").strategy.dgc_configs["sparsity"] == [0.75, 0.9]


@pytest.mark.parametrize("text", ["", "a,,b", "[a,b", "[[a]]", "[{a: b}]", "[" * 5000])
def test_a_damaged_list_is_refused(text: str) -> None:
    assert refusal("--lars.exclude_from_weight_decay", text).startswith("--lars.exclude_from_weight_decay is '")


def test_a_strategy_file_is_read_first_wherever_it_stands(tmp_path: Path) -> None:
    saved = DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2, "avg": False}, clip_norm=True)
    for name in ("strategy.yaml", "strategy.json"):
        saved.save(tmp_path / name)
        strategy = parse("--gradient_merge.k_steps=8", "--strategy", str(tmp_path / name), "--clip_norm", "false").strategy
        assert strategy == DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 8, "avg": False})


def test_a_part_that_is_switched_off_leaves_no_settings_behind(tmp_path: Path) -> None:
    DistributedStrategy(amp=True, amp_configs={"dtype": "float16"}).save(tmp_path / "fp16.yaml")
    strategy = parse("--strategy", str(tmp_path / "fp16.yaml"), "--amp=false").strategy
    assert strategy == DistributedStrategy() and strategy.parts() == []


def test_switching_a_part_off_and_setting_its_key_is_a_contradiction() -> None:
    told = refusal("--amp.dtype", "float16", "--amp", "false")
    assert told == "--amp false and --amp.dtype contradict each other: a key switches its part on. Keep one of them."


def test_a_scripts_own_strategy_is_copied_changed_by_flags_and_replaced_by_a_file(tmp_path: Path) -> None:
    own = DistributedStrategy(lars=True, lars_configs={"lars_coeff": 0.002})
    DistributedStrategy(lamb=True).save(tmp_path / "lamb.yml")
    changed = parse("--lars.epsilon", "1e-6", strategy=own).strategy
    assert changed.lars_configs == own.lars_configs.plain() | {"epsilon": 1e-6}
    assert own == DistributedStrategy(lars=True, lars_configs={"lars_coeff": 0.002})
    assert parse("--strategy", str(tmp_path / "lamb.yml"), strategy=own).strategy == DistributedStrategy(lamb=True)


def test_a_strategy_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("larz: true\n", encoding="utf-8")
    assert refusal("--strategy", str(tmp_path / "bad.yaml")).startswith(
        f"{tmp_path}/bad.yaml: DistributedStrategy has no setting"
    )
    assert (
        refusal("--strategy", f"{tmp_path}/no.yaml")
        == f"--strategy {tmp_path}/no.yaml cannot be read: No such file or directory."
    )
    assert "a strategy file ends in .json, .yaml or .yml" in refusal("--strategy", "null")


# What is not ours


def test_what_is_not_ours_is_left_in_order_and_untouched() -> None:
    words = ["data.txt", "--my-flag", "7", "--lr", "0.5", "-x", "--optim.lr=3", "--amp", "--l", "1", "-lr", "--my-flag=a=b", ""]
    configs = parse(*words)
    assert configs.rest == ["data.txt", "--my-flag", "7", "-x", "--optim.lr=3", "--l", "1", "-lr", "--my-flag=a=b", ""]
    assert (configs.lr, configs.strategy.amp) == (0.5, True)


def test_names_are_never_shortened() -> None:
    assert parse("--batch", "64", "--gradient_merg").rest == ["--batch", "64", "--gradient_merg"]


def test_two_dashes_end_what_is_ours() -> None:
    configs = parse("--lr", "0.5", "--", "--lr", "0.25", "--help")
    assert (configs.lr, configs.rest) == (0.5, ["--", "--lr", "0.25", "--help"])


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        (
            "--lars.lars_coef",
            "there is no flag --lars.lars_coef. Did you mean `lars.lars_coeff`? Its keys are: --lars.lars_coeff, ",
        ),
        ("--lars.lars-coef=0.1", "there is no flag --lars.lars-coef. Did you mean `lars.lars_coeff`?"),
        ("--gradient_merge.zzz", "there is no flag --gradient_merge.zzz. "),
        ("--gradient_merge_configs", "Its keys are: --gradient_merge.k_steps, --gradient_merge.avg."),
        ("--gradient_merge_configs.k_steps", "Did you mean `gradient_merge.k_steps`?"),
        ("--bf16_allreduce.dtype", "there is no flag --bf16_allreduce.dtype. It is a switch: --bf16_allreduce."),
        (
            "--gradient_marge.k_steps",
            "there is no strategy `gradient_marge` for --gradient_marge.k_steps. Did you mean `gradient_merge`?",
        ),
    ],
)
def test_a_near_miss_of_a_key_is_refused_with_the_nearest(flag: str, told: str) -> None:
    assert told in refusal(flag, "1")


def test_a_script_without_flags_of_its_own_refuses_what_is_left() -> None:
    parse("--lr", "0.5").refuse_rest()
    with pytest.raises(ConfigError, match=r"unknown argument '--batchsize=8'. Did you mean `batch_size`\? See --help."):
        parse("--batchsize=8").refuse_rest()


# Help


def test_help_names_every_key_with_its_meaning_and_default_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help", lr=0.125, strategy=DistributedStrategy(lars=True, lars_configs={"lars_coeff": 0.0625}))
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for name in [*OWN, "strategy", *SCALARS, *PARTS]:
        assert f"--{name} " in shown
    for one in SCALARS.values():
        assert one.doc and one.doc in shown and (one.kind.allowed in shown or accepts(one.kind, True))
    for name in PARTS:
        for field in dataclasses.fields(catalogue()[name]):
            assert f"--{name}.{field.name} " in shown and " ".join(field.metadata["doc"].split()) in shown
    assert "learning rate; a finite number above 0 (default: 0.125)" in shown
    assert 'every repeated block; a list of non-empty strings, such as ["layer1.0", "layer1.1"] (default: [])' in shown
    assert "(default: 0.0625)" in shown and "LARS: one learning rate per layer" in shown


def test_help_shows_the_scripts_own_flags_too_and_those_are_left_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, help="stop after so many")
    with pytest.raises(SystemExit):
        parse_train_configs(["--help"], parser=parser)
    shown = " ".join(capsys.readouterr().out.split())
    assert "--steps STEPS stop after so many" in shown and "--lr VALUE learning rate" in shown
    configs = parse_train_configs(["--steps", "3", "--lr", "0.5"], parser=parser)
    assert configs.lr == 0.5 and parser.parse_args(configs.rest).steps == 3


def test_a_parser_with_a_flag_that_is_read_here_is_refused() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int)
    with pytest.raises(ConfigError, match="parser has --batch-size, which parse_train_configs reads itself"):
        parse_train_configs([], parser=parser)
    with pytest.raises(ConfigError, match="it must be the script's own argparse.ArgumentParser"):
        parse_train_configs([], parser={"steps": int})  # type: ignore[arg-type]


# Every strategy

WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


def values(kind: Kind) -> st.SearchStrategy[Any]:
    """Values a kind accepts, found by asking it: a new part is covered without a word here."""
    words = re.findall(r"'([^']+)'", kind.allowed)
    options = [
        st.sampled_from(
            [
                v
                for v in [True, False, None, 1, 7, 8, 64, 0.25, 1.5, [], [0.5, 0.75], [0.5, 1, 2], "20GB", *words]
                if accepts(kind, v)
            ]
        )
    ]
    if accepts(kind, 0.25):
        options.append(st.floats(1e-300, 0.999))
    if accepts(kind, ["norm"]):
        options.append(st.lists(WORDS, max_size=3))
    return st.one_of(options)


@st.composite
def strategies(draw: st.DrawFn) -> DistributedStrategy:
    strategy = DistributedStrategy(**{name: draw(values(one.kind)) for name, one in SCALARS.items()})
    for name in draw(st.lists(st.sampled_from(PARTS), unique=True, max_size=4)):
        setattr(strategy, name, True)
        for field in dataclasses.fields(catalogue()[name]):
            if draw(st.booleans()):
                getattr(strategy, f"{name}_configs")[field.name] = draw(values(field.metadata["kind"]))
    return strategy


def as_flags(strategy: DistributedStrategy) -> list[str]:
    def text(value: Any) -> str:
        return json.dumps(value) if not isinstance(value, str) else value

    words = []
    for name, value in strategy.to_dict().items():
        if isinstance(value, dict):
            words += [f"--{name.removesuffix('_configs')}.{key}={text(inner)}" for key, inner in value.items()]
        else:
            words += [f"--{name}", text(value)]
    return words


@given(strategies())
def test_every_legal_strategy_can_be_written_as_flags(strategy: DistributedStrategy) -> None:
    configs = parse(*as_flags(strategy))
    assert configs.strategy == strategy and configs.rest == []


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_reads_back_from_its_text(number: float) -> None:
    assert scalar(str(number)) == number and type(scalar(str(number))) is float


@given(st.lists(st.text(max_size=12).map(lambda text: f"--{text}"), max_size=6))
def test_any_words_are_either_read_or_left_or_refused(words: list[str]) -> None:
    try:
        configs = parse("--mine", *words)
    except (ConfigError, SystemExit):
        return
    assert configs.rest[0] == "--mine"
