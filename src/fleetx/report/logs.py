"""The last lines of worker logs, cleaned for a page: no colours, and of a progress bar what it showed last."""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES, TAIL_LINES, MOST_LOGS = 24 << 10, 40, 6
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    lines = [_ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", line) for line in lines)


def tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read(TAIL_BYTES).decode("utf-8", errors="replace")
    lines = clean(text).rstrip().split("\n")
    return "\n".join(lines[1 if size > TAIL_BYTES and len(lines) > 1 else 0 :][-TAIL_LINES:])


def log_tails(folder: Path) -> dict[int, str]:
    """By rank; those with a traceback first, and not of all ranks where there are many. Empty ones say nothing."""
    found = {}
    for path in folder.glob("workerlog.*"):
        rank = path.name.partition(".")[2]
        if not rank.isdecimal() or not path.is_file():  # a link whose log folder is gone is no file
            continue
        try:
            text = tail(path)
        except OSError:
            continue
        if text.strip():
            found[int(rank)] = text
    order = sorted(found, key=lambda rank: ("Traceback (most recent call last)" not in found[rank], rank))
    return {rank: found[rank] for rank in order[:MOST_LOGS]}
