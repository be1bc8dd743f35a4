"""The bench of BERT's memory: its search, its words, and one small run of both contestants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.bert_memory import run as bert_memory
from bench.bert_memory.card import CountedCard, largest_that_fits, line_through, predicted
from bench.bert_memory.contestants import SMALL, Recipe, strategy_of
from bench.bert_memory.table import table, told, verdicts
from fleetx.errors import ConfigError

CELLS: dict[str, Any] = {
    "ours-fp32": {"max_batch": 42, "sentences_per_s": 45.0},
    "hf-fp32": {"max_batch": 21, "sentences_per_s": 36.0},
    "ours-bf16_recompute": {"max_batch": 420, "sentences_per_s": 225.0},
    "hf-bf16_recompute": None,
    "equal-bf16": {"batch": 60, "ratio": 0.78},
    "partial-64": {"batch": 64, "ratio": 0.88, "budget": 31 * 2**30},
}


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("guess", [1, 5, 40, 41, 42, 43, 60, 200])
@pytest.mark.parametrize("true_largest", [0, 1, 41, 42, 100])
def test_the_search_ends_at_the_largest_multiple_that_fits_whatever_the_guess(true_largest: int, guess: int, step: int) -> None:
    found = largest_that_fits(lambda batch: batch <= true_largest, guess, step=step, most=400)
    assert found.largest == true_largest // step * step
    assert found.too_large == found.largest + step
    assert len({batch for batch, _ in found.trials}) == len(found.trials), "none is tried twice"


def test_a_good_guess_takes_two_trials_and_a_bad_one_few() -> None:
    assert largest_that_fits(lambda batch: batch <= 300, 300, step=6, most=1000).trials == [(300, True), (306, False)]
    assert len(largest_that_fits(lambda batch: batch <= 300, 330, step=3, most=1000).trials) <= 8


def test_the_search_stops_at_the_most_that_is_allowed() -> None:
    found = largest_that_fits(lambda batch: True, 10, step=1, most=25)
    assert (found.largest, found.too_large) == (25, None)


def test_two_batches_give_the_bytes_of_none_and_of_each_sentence() -> None:
    assert line_through((2, 110), (6, 230)) == (50.0, 30.0)


def test_the_batch_is_predicted_by_the_line_that_is_highest_there() -> None:
    """Up to 40 sentences the update's 900 bytes are the peak, then the loss's 800 + 2.5 each, from 161 on a layer's 18 each."""
    tried: list[int] = []

    def peak(rows: int) -> int | None:
        tried.append(rows)
        bytes_needed = max(900, 800 + rows * 5 // 2, 1200 + 18 * (rows - 160))
        return bytes_needed if bytes_needed <= 9000 else None

    guess, _ = predicted(peak, (32, 64), capacity=9000)
    assert guess == 593 and len(tried) == 5  # 1200 + 18 (593 - 160) = 8994
    assert peak(593) == 8994 and peak(594) is None


def test_batches_that_do_not_fit_bound_the_one_that_is_predicted() -> None:
    """By the line it would be 1000: 500 is too large, 250 fits; of 500, 0.8 and of that 0.9 are too large."""
    assert predicted(lambda rows: 10 * rows if rows <= 300 else None, (20, 40), capacity=10_000)[0] == 360


def test_a_counted_card_runs_out_of_memory_when_more_is_saved_than_it_has() -> None:
    card = CountedCard(100 * 4)
    held = torch.ones(60, requires_grad=True)
    with card.watched():
        card.seconds(lambda: held.exp().sum().backward(), 3)  # 240 bytes in each step, never together
    assert card.facts()["peak"] == 240 and card.is_within()
    with pytest.raises(torch.OutOfMemoryError, match="480 bytes are saved; the card has 400"), card.watched():
        held.exp().exp().sum()


def test_both_contestants_get_the_same_tokens_and_labels() -> None:
    ours, theirs = (SMALL.batch(side, 3, torch.device("cpu")) for side in ("ours", "hf"))
    torch.testing.assert_close(ours["input_ids"], theirs["input_ids"], rtol=0, atol=0)
    labels = torch.full((3 * 32,), -100).index_put((ours["mlm_positions"],), ours["mlm_labels"])
    torch.testing.assert_close(labels.view(3, 32), theirs["labels"], rtol=0, atol=0)
    assert (theirs["labels"] != -100).sum(dim=1).tolist() == [4, 4, 4]


def test_a_recipe_becomes_the_strategy_of_its_name() -> None:
    stored, budgeted = strategy_of(Recipe.named("ours", "fp32")), strategy_of(Recipe("ours", amp=True, budget=2**30))
    assert (stored.amp, stored.recompute) == (False, False)
    assert (budgeted.amp, budgeted.recompute, budgeted.recompute_configs["budget"]) == (True, True, 2**30)


def test_verdicts_say_what_was_found_and_what_was_not_measured() -> None:
    found = verdicts(CELLS)
    assert told("fp32 batch", found["fp32 batch"]) == "yes  fp32 batch: 42, wanted at least 33"
    assert found["bf16_recompute sentences/s"] == {"found": 225.0, "wanted": 262.0, "holds": False}
    assert found["bf16 batch"]["holds"] is None
    assert (found["equal-bf16 ratio"]["holds"], found["partial-64 ratio"]["holds"]) == (True, False)


def test_the_table_has_both_sides_their_ratio_and_multiples_of_fp32_beside_fleets() -> None:
    lines = table(CELLS).splitlines()
    assert "| fp32 | 21 | 42 | 2.00 | 36.0 | 45.0 | 1.25 |" in lines
    assert "| bf16, recompute | - | 420 | - | - | 225.0 | - |" in lines
    # Fleet: 87 / 14 and 19.14 / 18.2; ours: 420 / 42 and 225 / 45.
    assert "| bf16, recompute | 6.21 | - | 10.00 | 1.05 | - | 5.00 |" in lines
    assert "- bf16, batch 60: recompute runs at 0.78 of the speed of storing." in lines
    assert any("batch 64, a plan within 31 GiB: 0.88 of the speed" in line for line in lines)


def test_figures_that_are_not_there_make_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--table .*none\.json cannot be read"):
        bert_memory.main(["--table", str(tmp_path / "none.json")])


@pytest.mark.parametrize("cell", ["ours-fp16", "partial-", "partial-many", "mine"])
def test_an_unknown_cell_is_refused_with_those_that_are_known(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bert_memory.main(["--small", "--cells", cell])
    said = " ".join(capsys.readouterr().err.split())
    assert f"--cells {cell!r} is no cell" in said and "equal-bf16" in said


def test_the_last_error_of_a_traceback_is_told_whole() -> None:
    printed = 'note\nTraceback (most recent call last):\n  File "a.py", line 1\n    f()\nConfigError: first.\nSecond line.\n'
    assert bert_memory.last_error(printed) == "ConfigError: first.\nSecond line."
    assert bert_memory.last_error("") == ""


@pytest.mark.campaign
def test_a_small_run_measures_both_sides_and_tells_the_error_of_a_cell_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    wanted = ["ours-bf16", "hf-bf16", "equal-fp32"]
    assert bert_memory.main(["--small", "--out", str(tmp_path), "--cells", *wanted]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, theirs = figures["cells"]["ours-bf16"], figures["cells"]["hf-bf16"]
    assert ours["max_batch"] + 1 == ours["too_large"] and ours["max_batch"] > theirs["max_batch"] > 0
    assert ours["sentences_per_s"] > 0 and ours["peak"] <= ours["allocator_capacity"]
    assert figures["cells"]["equal-fp32"] is None
    assert figures["errors"] == {"equal-fp32": "it needs the largest batch of ours-fp32, which is not known"}
    assert json.loads((tmp_path / "bert_memory.json").read_text())["cells"] == figures["cells"]
