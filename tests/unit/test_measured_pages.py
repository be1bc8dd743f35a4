"""Holds the measured pages to the published results: sentences, tables and charts are made by `python -m bench.pages`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.lib.bar_chart import Bar, bar_chart
from bench.pages import pages

PAGES = pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_each_measured_page_is_what_the_results_make(path: Path) -> None:
    assert path.read_text() == PAGES[path], "run: python -m bench.pages"


@pytest.mark.parametrize("path", [path for path in PAGES if path.name != "combinations.md"], ids=lambda path: path.name)
def test_a_page_begins_with_its_result_and_a_chart_and_folds_its_targets(path: Path) -> None:
    paragraphs = [part for part in PAGES[path].split("\n\n") if not part.startswith("<!--")]
    assert paragraphs[0].startswith("# ")
    assert re.fullmatch(r"\*\*.*\d.*\.\*\*", paragraphs[1]), paragraphs[1]
    assert paragraphs[2].startswith('<figure class="bars"><svg ')
    before, _, after = PAGES[path].partition("<summary>What was wanted of these figures, and whether it holds</summary>")
    assert after and "wanted" not in before.split("## ")[0]


def test_the_longest_bar_fills_the_width_others_are_in_proportion_and_texts_are_escaped() -> None:
    chart = bar_chart("a < b", [Bar("one", 2.0, "2 ms"), Bar("two", 0.5, "0.5 ms", is_ours=False)])
    assert re.findall(r'width="([\d.]+)" height="9" rx="2" class="(\w+)"', chart) == [
        ("400", "track"),
        ("400.0", "ours"),
        ("400", "track"),
        ("100.0", "other"),
    ]
    assert "a &lt; b" in chart and "\n" not in chart


def test_bars_that_are_all_zero_are_drawn_empty() -> None:
    assert 'width="0.0"' in bar_chart("nothing lost", [Bar("one", 0.0, "0")])
