"""Format findings and tables as text for a terminal and as JSON for scripts."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import fleetx

from ..config.text import aligned
from .facts import Facts
from .finding import Finding, Table, count

if TYPE_CHECKING:
    from rich.table import Table as RichTable

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
WIDE = 10_000
"""Columns without a terminal: lines are not wrapped and can be searched."""


def to_text(findings: Sequence[Finding], tables: Sequence[Table], *, width: int, has_colour: bool) -> str:
    from rich.console import Console

    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=has_colour, color_system="standard" if has_colour else None, highlight=False
    )
    console.print(_grid(findings))
    for table in tables:
        console.print()
        console.print("\n".join(_exchange(table)), markup=False)
    console.print()
    console.print(verdict(findings), style=STYLES["problem" if count(findings, "problem") else "ok"], markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _grid(findings: Sequence[Finding]) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    topic = ""
    for finding in findings:
        what = Text(finding.what)  # not parsed as markup: it may hold names and messages from elsewhere
        if finding.fix:
            what.append(f"\nfix: {finding.fix}", style="bold" if finding.level == "problem" else "")
        name = finding.topic if finding.topic != topic else ""
        grid.add_row(name, Text(finding.level, style=STYLES[finding.level]), what)
        topic = finding.topic
    return grid


def _exchange(table: Table) -> list[str]:
    rows = [
        [
            f"{row.size_bytes:,}",
            f"{1e3 * row.seconds:.3f}",
            f"{row.bus_bytes_per_second / 1e9:.3f}" if row.size_bytes >= 1e4 else "-",
            "right" if row.is_sum_right else "WRONG",
        ]
        for row in table.rows
    ]
    head = ["bytes", "latency, ms", "bus, GB/s", "sum"]
    return [f"all-reduce over {table.backend}, {table.ranks} ranks", *aligned([head, *rows])]


def verdict(findings: Sequence[Finding]) -> str:
    problems, notes = count(findings, "problem"), count(findings, "note")
    summary = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem"
    return summary + (f", {notes} note{'s' * (notes != 1)}" if notes else "")


def to_json(facts: Facts, findings: Sequence[Finding], tables: Sequence[Table], seconds: float) -> str:
    content = {
        "fleetx": fleetx.__version__,
        "ok": not count(findings, "problem"),
        "problems": count(findings, "problem"),
        "notes": count(findings, "note"),
        "seconds": round(seconds, 2),
        "findings": [asdict(finding) for finding in findings],
        "all_reduce": [asdict(table) for table in tables],
        "facts": asdict(facts),
    }
    return json.dumps(content, indent=2)


def screen() -> tuple[int, bool]:
    """Return the width of the terminal, and whether to use colours."""
    if not sys.stdout.isatty():
        return WIDE, False
    try:
        width = os.get_terminal_size(1).columns
    except OSError:
        width = 80
    return max(40, width), not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
