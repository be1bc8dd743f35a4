"""Write the updates of runs as one table of comma-separated values, which spreadsheets and data frames read."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from .metrics import NUMBERS
from .read import Run

FIRST = ("run", "pair", "start", "step", "total_seconds", "skipped")


def csv_text(runs: Sequence[Run]) -> str:
    """Return a line for each update; cells without a number are empty."""
    every = [(run, update) for run in runs for updates in run.updates.values() for update in updates]
    values = list(dict.fromkeys(name for _, update in every for name in update.values))
    parts = list(dict.fromkeys(part for _, update in every for part in update.split))
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow([*FIRST, *NUMBERS, *(f"split.{part}" for part in parts), *(f"values.{name}" for name in values)])
    for run, update in every:
        first = [_cell(run.name), update.pair, update.start, update.step, update.total_seconds, int(update.skipped)]
        numbers = [getattr(update, name) for name in NUMBERS]
        rows.writerow([*first, *numbers, *map(update.split.get, parts), *map(update.values.get, values)])
    return file.getvalue()


def _cell(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
