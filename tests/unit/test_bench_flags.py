"""The command lines of the benches of LARS and LAMB: every flag is explained, and what they cannot do is one sentence."""

import json
import re
from dataclasses import fields

import pytest

from bench.large_batch import run as large_batch
from bench.large_batch.flags import SMOKE, flags_of
from bench.large_batch.recipe import Recipe
from bench.large_batch.summary import told, verdict, verdicts
from bench.optimizer_step import run as optimizer_step
from fleetx.errors import ConfigError


def help_of(call, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # argparse breaks lines inside words that have a hyphen
    with pytest.raises(SystemExit) as ended:
        call(["--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_of_large_batches_has_a_meaning_and_a_default_for_every_flag(capsys, monkeypatch):
    shown = help_of(flags_of, capsys, monkeypatch)
    options = shown.partition("options: -h, --help show this help message and exit ")[2]
    entries = re.split(r"(?<=\)) (?=--)", options)
    assert len(entries) == len(vars(flags_of([])))
    for entry in entries:
        assert re.fullmatch(r"--.* \w+.* \(default: .+\)", entry), entry
    for field in fields(Recipe):
        assert field.metadata["doc"] in shown
    assert f"(default: 30; with --smoke {SMOKE.epochs})" in shown and "first outputs (default: on)" in shown


@pytest.mark.parametrize("text", [None, "{", "[]", json.dumps({"bench": "guards"})])
def test_a_page_of_figures_that_are_not_there_is_refused_and_nothing_written(tmp_path, text):
    file, page = tmp_path / "figures.json", tmp_path / "docs" / "page.md"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"--table .*figures\.json .*: bench/results/large_batch\.json\."):
        large_batch.main(["--table", str(file), "--page", str(page)])
    assert not page.parent.exists()


def test_a_verdict_without_its_cells_says_that_it_was_not_measured():
    assert [told(one) for one in verdicts({}).values()] == [
        "not measured: sgd@512 reaches 93 %",
        "not measured: lars@2048 is at most 0.3 points behind sgd@512",
        "not measured: lars@8192 is at most 1.5 points behind sgd@512",
        "not measured: lars@8192 is ahead of sgd@8192 by more than the larger spread of the two",
    ]
    assert told(verdict("sgd@512 reaches 93 %", 92.5, False)) == "NO  sgd@512 reaches 93 %: 92.5"


def test_an_arena_that_there_is_not_is_refused_with_all_their_names(capsys):
    with pytest.raises(SystemExit) as ended:
        optimizer_step.main(["--cpu", "--only", "lamb", "nonsense"])
    assert ended.value.code == 2
    names = "bert_4_layers_lamb, bert_4_layers_lars, resnet50_lamb, resnet50_lars, checks."
    assert f"--only 'nonsense' is part of no name; on a CPU there are {names}" in capsys.readouterr().err


def test_parts_of_names_choose_arenas():
    assert optimizer_step.unknown_part(["lamb", "bert_large", "checks"], "cuda") is None
    assert optimizer_step.unknown_part([], "cpu") is None
    assert "on a GPU" in str(optimizer_step.unknown_part(["bert_4"], "cuda"))


def test_help_of_a_step_explains_its_words_and_lists_the_arenas(capsys, monkeypatch):
    shown = help_of(optimizer_step.main, capsys, monkeypatch)
    for word in ("arena one model under one optimizer", "touch_once the floor if", "exact a floor that", "bert_large_lamb,"):
        assert word in shown
