"""Formulas of the documentation as MathML: every block of every page is typeset, and brackets stay where they mean something."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("formulas", DOCS / "hooks" / "formulas.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FORMULAS = _load()
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if FORMULAS.BLOCK.search(path.read_text())]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_formula_of_a_page_is_typeset(path: Path) -> None:
    for block in FORMULAS.BLOCK.findall(path.read_text()):
        assert FORMULAS.typeset(block).count("<math") == len(block.strip().splitlines())


def test_pages_of_update_rules_have_formulas() -> None:
    assert {"dgc", "lamb", "lars", "localsgd"} <= {path.stem for path in PAGES}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("beta1^t", "<msup><msub><mi>β</mi><mn>1</mn></msub><mi>t</mi></msup>"),
        ("|p| / |u|", "<mfrac><mrow><mo>‖</mo><mi>p</mi><mo>‖</mo></mrow><mrow><mo>‖</mo><mi>u</mi><mo>‖</mo></mrow></mfrac>"),
        ("a * b + c", "<mrow><mrow><mi>a</mi><mo>·</mo><mi>b</mi></mrow><mo>+</mo><mi>c</mi></mrow>"),
        (
            "a - (b - c)",
            "<mrow><mi>a</mi><mo>−</mo><mrow><mo>(</mo><mrow><mi>b</mi><mo>−</mo><mi>c</mi></mrow><mo>)</mo></mrow></mrow>",
        ),
    ],
)
def test_an_expression_is_written_with_brackets_only_where_it_needs_them(text: str, expected: str) -> None:
    assert FORMULAS.mathml(text) == expected


def test_what_cannot_be_typeset_stops_the_build() -> None:
    with pytest.raises(ValueError, match="cannot be typeset"):
        FORMULAS.mathml("a if b else c")
