"""One thing that was looked at, how it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final

Level = Literal["ok", "note", "problem"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    level: Level
    what: str
    fix: str = ""
    """A command or a sentence; every problem has one."""


def ok(topic: str, what: str) -> Finding:
    return Finding(topic, "ok", what)


def note(topic: str, what: str, fix: str = "") -> Finding:
    return Finding(topic, "note", what, fix)


def problem(topic: str, what: str, fix: str) -> Finding:
    return Finding(topic, "problem", what, fix)


def count(findings: Iterable[Finding], level: Level) -> int:
    return sum(finding.level == level for finding in findings)
