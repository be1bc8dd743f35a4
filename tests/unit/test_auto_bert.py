"""bench/auto_bert without a GPU: its page, also of plans that failed, and rows of several runs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bench.auto_bert.page import OF_MISSES, section
from bench.auto_bert.run import rows_kept

PUBLISHED = Path(__file__).parents[2] / "bench" / "results" / "auto_bert.json"


@pytest.fixture
def figures() -> dict[str, Any]:
    return copy.deepcopy(json.loads(PUBLISHED.read_text()))


def test_a_plan_that_failed_has_its_error_on_the_page(figures: dict[str, Any]) -> None:
    figures["rows"]["plan"]["unseen"].append({"name": "bf16, 1 x 1024", "error": "CUDA out of memory"})
    assert "| bf16, 1 x 1024 | CUDA out of memory |" in section(figures)


def test_misses_are_explained_where_there_are_any(figures: dict[str, Any]) -> None:
    for one in figures["rows"]["plan"]["unseen"]:
        one["off"] = 0.01
    assert OF_MISSES not in section(figures)
    figures["rows"]["plan"]["unseen"][-1]["off"] = -0.2
    assert OF_MISSES in section(figures)


def test_rows_of_another_run_keep_its_commit(figures: dict[str, Any], tmp_path: Path) -> None:
    figures["rows"]["plan"]["commit"] = "1234567"
    file = tmp_path / "auto_bert.json"
    file.write_text(json.dumps(figures))
    rows = rows_kept(file)
    assert rows["plan"]["commit"] == "1234567" and rows["hf-bf16-32"]["commit"] == figures["commit"]
    page = section({**figures, "commit": "7654321", "rows": rows})
    assert [line.count(figures["commit"]) for line in page.splitlines() if line.startswith("| hf-bf16-32 ")] == [1]
