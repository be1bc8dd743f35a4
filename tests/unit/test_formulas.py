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


@pytest.mark.parametrize("path", sorted((DOCS / "strategies").glob("*.md")), ids=lambda path: path.stem)
def test_the_formula_of_every_strategy_is_typeset(path: Path) -> None:
    section = path.read_text().partition("\n## Formula\n")[2].partition("\n## ")[0]
    assert "```formula" in section or section.lstrip().startswith("None:"), section
    assert "```text" not in section


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("beta1^t", "<msup><msub><mi>β</mi><mn>1</mn></msub><mi>t</mi></msup>"),
        ("|p| / |u|", "<mfrac><mrow><mo>‖</mo><mi>p</mi><mo>‖</mo></mrow><mrow><mo>‖</mo><mi>u</mi><mo>‖</mo></mrow></mfrac>"),
        ("ceil(a)", "<mrow><mo>⌈</mo><mi>a</mi><mo>⌉</mo></mrow>"),
        ("M.T @ P", "<mrow><msup><mi>M</mi><mo>⊤</mo></msup><mo>&#x2062;</mo><mi>P</mi></mrow>"),
        (
            "(M @ Q).T",
            "<msup><mrow><mo>(</mo><mrow><mi>M</mi><mo>&#x2062;</mo><mi>Q</mi></mrow><mo>)</mo></mrow><mo>⊤</mo></msup>",
        ),
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
