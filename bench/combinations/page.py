"""docs/combinations.md, of what bench/combinations has found."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

SIGNS = {"green": "yes", "refused": "no", "broken": "**broken**"}
INTRO = """# Which strategies go together

<!-- Made from a run of `python -m bench.combinations.run` by its `--table`; do not edit. -->

Every set of up to three strategies was tried on two workers: {green} work, {refused} are refused, {broken} are broken. A set
works if

- the loss falls, and all workers end with the same weights;
- `recompute` changes no bit of the set without it, and 16 bits (`amp`, 16-bit all-reduce) end near the set without them;
- strategies that are set to do nothing leave the set without them as it is;
- a run that is stopped in the middle of a merge window and of a Local SGD period, and resumed, has the bits of one that was not;
- an overflow on one worker damages no weights.

A set is refused, on all workers and before anything is touched, where two of its strategies claim the same place in a step. The
error says which and what to do. A larger set is refused only because of a pair in it.
"""


def page(figures: Mapping[str, Any], fleets: Sequence[Sequence[str]]) -> str:
    rows = figures["rows"]
    of = {tuple(row["names"]): row for row in rows if "(" not in row["shown"]}
    names = [row["names"][0] for row in rows if len(row["names"]) == 1 and "(" not in row["shown"]]
    parts = [INTRO.format(**figures["counts"]), pairs(names, of), reasons(of), named(of, rows, fleets), triples(of), broken(rows)]
    made = f"{figures['date'][:10]}, commit {figures['commit']}, torch {figures['torch']}, {figures['device']}, two gloo workers."
    return "\n\n".join([*(part for part in parts if part), made]) + "\n"


MARKS = {"green": ("yes", "●"), "refused": ("no", "×"), "broken": ("broken", "!")}
"""Class and sign of a cell: a reader who does not see colours reads the sign."""


def pairs(names: Sequence[str], of: Mapping[tuple[str, ...], Any]) -> str:
    """Draw the matrix as HTML, of which a plain Markdown viewer shows the table without its colours."""
    heads = "".join(f'<th scope="col"><span>{name}</span></th>' for name in names)
    lines = [f'<tr><th scope="row">{one}</th>{"".join(cell(one, other, of) for other in names)}</tr>' for one in names]
    table = "\n".join(
        ['<table class="matrix">', f"<thead><tr><th></th>{heads}</tr></thead>", "<tbody>", *lines, "</tbody>", "</table>"]
    )
    told = "● works, × is refused: point at a cell for the reason, also in the list below. On the diagonal each strategy alone."
    return f"## Pairs\n\n{told}\n\n{table}"


def cell(one: str, other: str, of: Mapping[tuple[str, ...], Any]) -> str:
    row = of[tuple(sorted({one, other}))]
    kind, sign = MARKS[row["state"]]
    why = row.get("why") or "; ".join(row["wrong"]) or f"{' and '.join(dict.fromkeys((one, other)))}: works"
    return f'<td class="{kind}" title="{html.escape(why)}">{sign}</td>'


def reasons(of: Mapping[tuple[str, ...], Any]) -> str:
    told = [f"- {row['why']}" for names, row in of.items() if len(names) == 2 and row["state"] == "refused"]
    return folded("Why pairs are refused", told)


def folded(title: str, lines: Sequence[str]) -> str:
    """Return a section that is opened by a click."""
    return "\n".join(
        [f"## {title}", "", '<details markdown="1">', f"<summary>{len(lines)} in all</summary>", "", *lines, "", "</details>"]
    )


def named(of: Mapping[tuple[str, ...], Any], rows: Sequence[Mapping[str, Any]], fleets: Sequence[Sequence[str]]) -> str:
    lines = [f"- {' + '.join(f'`{name}`' for name in names)}: {SIGNS[of[tuple(sorted(names))]['state']]}" for names in fleets]
    adam = [f"- `adaptive_localsgd` with Adam: {SIGNS[row['state']]}" for row in rows if "(" in row["shown"]]
    beyond = (
        "Fleet drops or refuses, and this library trains: `amp` with `dgc`; `localsgd` with `lars`, `lamb`, `recompute` or "
        "`gradient_merge`; `gradient_merge` with `dgc`; `fp16_allreduce` with `amp`; `adaptive_localsgd` with `lamb`, and:"
    )
    return "\n".join(["## The ten that Fleet documents", "", *lines, "", beyond, "", *adam])


def triples(of: Mapping[tuple[str, ...], Any]) -> str:
    shown = [" + ".join(names) for names, row in of.items() if len(names) == 3 and row["state"] == "green"]
    return folded("Sets of three that work", [f"- {text}" for text in shown])


def broken(rows: Sequence[Mapping[str, Any]]) -> str:
    found = [f"- {row['shown']}: {'; '.join(row['wrong'])}" for row in rows if row["state"] == "broken"]
    return "\n".join(["## Known broken", "", *found]) if found else ""
