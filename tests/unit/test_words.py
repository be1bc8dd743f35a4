"""Check the sources and the documentation for words that have a plainer equivalent, and docstrings for a verb at their beginning.

`make lint` runs this file as a script. Only the standard library is imported here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAIN = {
    "foretold": "predicted",
    "foretell": "predict",
    "foretells": "predicts",
    "heed": "follow, apply or obey",
    "heeds": "follows, applies or obeys",
    "heeded": "followed, applied or obeyed",
    "mend": "fix, correct or retry",
    "mends": "fixes, corrects or retries",
    "mended": "fixed, corrected or retried",
    "anew": "again, or a new ...",
    "whoever": "the name of the caller or the object",
    "somebody": "the name of the caller or the object",
    "nobody": "no ..., with the name of the caller or the object",
    "everybody": "every rank, all users, ...",
}
"""Each word that is not used, with what to write instead."""
WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(sorted(PLAIN, key=len, reverse=True))})(?![a-z])", re.IGNORECASE)
"""Matches in names as well (`_heed_plan`, `EXIT_NOBODY`), but not inside other words (`recommend`)."""

NO_VERBS = frozenset(
    "a after all an any as at before between both by each every for from how if in inside it its no not of on once one only "
    "own some such that the there these this those to true until what when where whether which who with without".split()
)
"""Words that a function's docstring does not begin with: it begins with a verb. That of a property may be a noun."""


def checked_files() -> Iterator[Path]:
    yield from sorted((ROOT / "src").rglob("*.py"))
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield ROOT / "README.md"
    yield ROOT / "CONTRIBUTING.md"


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the word, and what to write instead."""
    for number, line in enumerate(text.splitlines(), start=1):
        for match in WORD.finditer(line):
            yield number, match[0], PLAIN[match[0].lower()]


def verbless(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and beginning of each function's docstring that begins with another word than a verb, or with none."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or any(
            "property" in ast.dump(d) for d in node.decorator_list
        ):
            continue
        words = (ast.get_docstring(node) or "Do").split()
        if words[0].lower() in NO_VERBS or not words[0][0].isupper():
            yield node.body[0].lineno, " ".join(words[:6])


def all_findings() -> list[str]:
    docstrings = [
        f"{path.relative_to(ROOT)}:{number}: a docstring begins with a verb, not `{words} ...`"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for number, words in verbless(path.read_text(encoding="utf-8"))
    ]
    return docstrings + [
        f"{path.relative_to(ROOT)}:{number}: `{word}`: write {plain}"
        for path in checked_files()
        for number, word, plain in findings(path.read_text(encoding="utf-8"))
    ]


def test_sources_and_pages_use_plain_words_and_docstrings_begin_with_a_verb() -> None:
    found = all_findings()
    assert not found, "\n".join(["", *found])


def test_a_word_is_found_in_prose_and_in_names_but_not_inside_other_words() -> None:
    assert list(findings("recommended\nNobody is told.\n_heed_plan")) == [
        (2, "Nobody", PLAIN["nobody"]),
        (3, "heed", PLAIN["heed"]),
    ]


def test_a_docstring_without_a_verb_is_found_and_that_of_a_property_may_be_a_noun() -> None:
    source = '''
class Bucket:
    @property
    def is_full(self):
        """Whether all gradients have come."""

    def expect(self):
        """A backward begins."""

    def close(self):
        """`early` says that gradients are missing."""

    def launch(self):
        """Send it."""

    def keep(self): ...
'''
    assert list(verbless(source)) == [(8, "A backward begins."), (11, "`early` says that gradients are missing.")]


if __name__ == "__main__":
    lines = all_findings()
    print("\n".join(lines), file=sys.stderr)
    sys.exit(bool(lines))
