"""How many sentences fit on a card of 32 GB, and how fast they are then: BERT-large, 512 tokens, transformers' model beside ours.

    python -m bench.bert_memory.run                               on a GPU: all cells, about five minutes
    python -m bench.bert_memory.run --only ours                   ours alone
    python -m bench.bert_memory.run --cells ours-bf16 hf-bf16     some cells; they join those in --out, if any are there
    python -m bench.bert_memory.run --small                       a tiny model on the CPU, to see that it runs; nothing is kept
    python -m bench.bert_memory.run --table                       makes docs/memory.md of what was published; no run

A cell is one contestant (bench/bert_memory/contestants.py) in a process of its own, with expandable segments for all alike.
    ours-KIND, hf-KIND    KIND is fp32 (TF32 off), fp32_recompute, bf16 (autocast) or bf16_recompute: the largest batch within
                          32 GiB, each trial two whole steps, and sentences a second at it, the median of some steps by events;
                          also of batches a little smaller, which may be faster
    equal-fp32, -bf16     ours at the largest batch that is stored: recomputing over storing
    partial-BATCH         ours in bf16, recompute by a budget of 31 GiB, over storing everything on the whole card
What is capped, and how: bench/bert_memory/card.py. A cell that fails is null, and its error is beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.bert_memory.card import LIMIT
from bench.bert_memory.table import KINDS, page, told, verdicts
from bench.lib.results import FOLDER, ROOT, publish, published, surroundings, write_page

NAME = "bert_memory"
PARTIAL_BATCHES = (64, 112)
"""64 is the one that was promised; the larger one can be trained only with a plan."""
CELL_SECONDS = 240
ALLOCATOR = "expandable_segments:True"
CELLS = [
    *(f"{side}-{kind}" for kind in KINDS for side in ("ours", "hf")),
    "equal-fp32",
    "equal-bf16",
    *(f"partial-{batch}" for batch in PARTIAL_BATCHES),
]
PUBLISHED = FOLDER / f"{NAME}.json"
PAGE = ROOT / "docs" / "memory.md"


def arguments_of(cell: str, cells: dict[str, Any]) -> list[str] | str:
    """Of the cell's process; or a sentence on why it cannot be run."""
    side, _, kind = cell.partition("-")
    if side == "partial":
        return ["partial", "--batch", kind]
    if side != "equal":
        return [cell]
    stored = (cells.get(f"ours-{kind}") or {}).get("max_batch")
    return (
        ["equal-" + kind, "--batch", str(stored)] if stored else f"it needs the largest batch of ours-{kind}, which is not known"
    )


def last_error(printed: str) -> str:
    """What follows the last indented line, which is where a traceback ends."""
    lines = printed.strip().splitlines()
    indented = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return "\n".join(lines[indented[-1] + 1 :] if indented else lines[-3:])


def run_cell(cell: str, cells: dict[str, Any], *, small: bool) -> tuple[dict[str, Any] | None, str | None]:
    """Its figures, or None and why."""
    arguments = arguments_of(cell, cells)
    if isinstance(arguments, str):
        return None, arguments
    command = [sys.executable, "-m", "bench.bert_memory.cell", *arguments, *(["--small"] if small else [])]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": ALLOCATOR}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=CELL_SECONDS, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return None, f"it took more than {CELL_SECONDS} s"
    if done.returncode != 0:
        return None, last_error(done.stderr) or f"exit code {done.returncode}"
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures, None


def earlier(out: Path | None) -> dict[str, Any]:
    file = out / f"{NAME}.json" if out else None
    return json.loads(file.read_text()) if file and file.exists() else {"cells": {}, "errors": {}, "made": {}}


def run(wanted: Sequence[str], out: Path | None, *, small: bool) -> dict[str, Any]:
    known = earlier(out)
    cells, errors, made = known["cells"], known["errors"], known["made"]
    for cell in wanted:
        start = time.perf_counter()
        cells[cell], error = run_cell(cell, cells, small=small)
        errors.pop(cell, None)
        made[cell] = {"date": now(), "commit": surroundings()["commit"]}  # cells of several runs may be joined
        if error is not None:
            errors[cell] = error
        short = error or {name: cells[cell][name] for name in ("max_batch", "sentences_per_s", "ratio") if name in cells[cell]}
        print(f"{cell:22} {time.perf_counter() - start:6.1f} s  {short}", flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{NAME}.json").write_text(json.dumps(record(cells, errors, made), indent=2) + "\n")
    return record(cells, errors, made)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def record(cells: dict[str, Any], errors: dict[str, str], made: dict[str, Any]) -> dict[str, Any]:
    """All that is published, so that the file of a run on another machine can be put into bench/results as it is."""
    figures = {"allocator": ALLOCATOR, "limit_bytes": LIMIT, "cells": cells, "errors": errors, "made": made}
    return {"bench": NAME, "date": now(), **surroundings(), **figures, "verdicts": verdicts(cells)}


def chosen(only: str | None, cells: Sequence[str] | None) -> list[str]:
    wanted = list(cells) if cells else CELLS
    return [cell for cell in wanted if only is None or (cell.startswith("hf-")) == (only == "hf")]


def flags_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU; nothing is kept (default: off)")
    parser.add_argument("--only", choices=("ours", "hf"), default=None, help="the cells of one side (default: both)")
    parser.add_argument(
        "--cells", nargs="+", default=None, metavar="CELL", help=f"of {', '.join(CELLS)}, or partial-BATCH (default: all)"
    )
    parser.add_argument(
        "--out", type=Path, default=None, metavar="FOLDER", help="where figures are written after each cell (default: none)"
    )
    parser.add_argument(
        "--table", type=Path, nargs="?", const=PUBLISHED, default=None, metavar="FILE",
        help=f"makes a page of these figures, and runs nothing (default: off; without FILE: {PUBLISHED.name})",
    )  # fmt: skip
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="for --table (default: docs/memory.md)")
    flags = parser.parse_args(arguments)
    for cell in flags.cells or []:
        if cell not in CELLS and not (cell.startswith("partial-") and cell.removeprefix("partial-").isdigit()):
            parser.error(f"--cells {cell!r} is no cell; there are {', '.join(CELLS)}, and partial-BATCH with any batch.")
    if flags.table is None and not flags.small and not torch.cuda.is_available():
        parser.error("there is no GPU here; --small runs a tiny model on the CPU.")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    flags = flags_of(arguments)
    if flags.table is not None:
        write_page(flags.page, page(published(flags.table, NAME)))
        return 0
    figures = run(chosen(flags.only, flags.cells), flags.out, small=flags.small)
    if flags.small:
        print(json.dumps(figures))
        return 0
    for name, one in figures["verdicts"].items():
        print(told(name, one))
    if set(figures["cells"]) >= set(CELLS):
        publish(NAME, figures)
    else:  # a part of it replaces nothing that is published
        print(json.dumps(figures))
    missed = [name for name, one in figures["verdicts"].items() if one["holds"] is False]
    return 1 if missed or figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
