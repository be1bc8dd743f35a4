"""What the blocks of bench/compression_speed say: steps, ratios, the limit of a link, and whether it is what was wanted."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.compression_speed.contestants import ALONE, BF16, DDP, DGC, POWERSGD

Record = Mapping[str, Any]
COMPLAINT = re.compile(r"what\(\): *(.*)|^(?:\S*\| *)?(\w*Error: .*)", re.MULTILINE)
FAST = (
    ("100", DGC, "times_ddp", 12.0),
    ("100", DGC, "of_alone", 0.75),
    ("100", POWERSGD, "times_ddp", 8.0),
    ("100", BF16, "times_ddp", 1.7),
    ("1000", DGC, "times_ddp", 2.0),
    ("1000", POWERSGD, "times_ddp", 2.0),
)
WORDS = {"times_ddp": "times DDP's throughput", "of_alone": "of the throughput without communication"}


def ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """How many times faster, round by round: what slows the machine for a while slows both."""
    return round(statistics.median(other / own for own, other in zip(seconds, others, strict=True)), 4)


def row_of(row: Record, rows: Mapping[str, Record], rate_mbit: float) -> dict[str, Any]:
    seconds, alone = row["seconds"], rows[ALONE]["seconds"]
    step_ms, alone_ms = (statistics.median(one) * 1e3 for one in (seconds, alone))
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    limit_ms = alone_ms + row["bytes_per_step"] * 8 / (rate_mbit * 1e3)
    return {
        "step_ms": round(step_ms, 1),
        "step_quartiles_ms": [round(one * 1e3, 1) for one in quartiles[::2]],
        "times_ddp": ratio(seconds, rows[DDP]["seconds"]),
        "of_alone": ratio(seconds, alone),
        "bytes_per_step": row["bytes_per_step"],
        "link_bytes_per_step": row["link_bytes_per_step"],
        "limit_ms": round(limit_ms, 1),
        "steps": row["steps"],
    }


def figures_of(rows: Mapping[str, Record], rate_mbit: float) -> dict[str, dict[str, Any]]:
    """A row that has died tells why, in place of figures."""
    return {name: dict(row) if "raised" in row else row_of(row, rows, rate_mbit) for name, row in rows.items()}


def complaint(text: str) -> str | None:
    """The first error in what a job wrote, on one line."""
    found = COMPLAINT.search(text)
    return " ".join((found.group(1) or found.group(2)).split()) if found else None


def verdicts(links: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """Of the rates that were measured; `links` is by rate."""
    found = {}
    for rate, row, figure, least in FAST:
        if rate in links:
            value = links[rate]["rows"][row][figure]
            found[f"{rate} Mbit/s, {row}: {figure}"] = {
                "wanted": f"{row} at {rate} Mbit/s: at least {least:g} {WORDS[figure]}",
                "numbers": {"measured": value},
                "holds": value >= least,
            }
    return found


def show(link: Record) -> None:
    print(f"{link['rate_mbit']:g} Mbit/s")
    for name, row in link["rows"].items():
        if "raised" in row:
            print(f"{name:38} does not run: {row['raised']}")
            continue
        times = f"{row['times_ddp']:6.2f} x DDP  {row['of_alone']:.3f} of no communication"
        print(f"{name:38} {row['step_ms']:8.1f} ms  {times}  {row['bytes_per_step']:>10,} B  limit {row['limit_ms']:.1f} ms")
