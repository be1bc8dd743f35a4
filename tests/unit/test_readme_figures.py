"""README's table of gains: each figure is one of the result files that its row names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line.strip("|").split(" | ") for line in (ROOT / "README.md").read_text().splitlines() if "`bench/" in line]
SCALES = (1, 100, -1, -100)
"""A share may be shown in percent, and a loss of points as a negative number."""


def numbers(value: Any) -> Iterator[float]:
    """Every number of a result file, also in texts, and throughputs in that of DDP where both are there."""
    if isinstance(value, dict):
        if isinstance(ddp := value.get("ddp"), dict) and "samples_per_s" in ddp:
            yield from (row["samples_per_s"] / ddp["samples_per_s"] for row in value.values() if "samples_per_s" in row)
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, str):
        yield from (float(text) for text in re.findall(r"\d+(?:\.\d+)?", value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def measured(names: list[str]) -> list[float]:
    files = [file for name in names for file in sorted((ROOT / "bench" / "results").glob(f"{name}*.json"))]
    return [number for file in files for number in numbers(json.loads(file.read_text()))]


def is_among(figure: str, known: list[float]) -> bool:
    decimals = len(figure.partition(".")[2])
    wanted = float(figure.replace(",", ""))
    return any(round(scale * number, decimals) == wanted for number in known for scale in SCALES) or any(
        number and round(1 / number, decimals) == wanted for number in known
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-1].strip())
def test_every_figure_of_a_row_is_in_the_results_it_names(row: list[str]) -> None:
    known = measured(re.findall(r"`bench/(\w+)`", row[-1]))
    told = re.sub(r"`[^`]*`|\([^)]*k = \d+\)", "", row[1])
    figures = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", told)
    assert known and figures and [figure for figure in figures if not is_among(figure, known)] == []


def test_a_figure_that_was_not_measured_is_found() -> None:
    known = measured(["localsgd_table"])
    assert is_among("2.7", known) and not is_among("9.7654", known)
