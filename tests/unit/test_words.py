"""Check the sources and the documentation for words that have a plainer equivalent; `make lint` runs this file as a script.

Only the standard library is imported here.
"""

from __future__ import annotations

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


def all_findings() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: `{word}`: write {plain}"
        for path in checked_files()
        for number, word, plain in findings(path.read_text(encoding="utf-8"))
    ]


def test_sources_and_pages_use_plain_words() -> None:
    found = all_findings()
    assert not found, "\n".join(["", *found])


def test_a_word_is_found_in_prose_and_in_names_but_not_inside_other_words() -> None:
    assert list(findings("recommended\nNobody is told.\n_heed_plan")) == [
        (2, "Nobody", PLAIN["nobody"]),
        (3, "heed", PLAIN["heed"]),
    ]


if __name__ == "__main__":
    lines = all_findings()
    print("\n".join(lines), file=sys.stderr)
    sys.exit(bool(lines))
