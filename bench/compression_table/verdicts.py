"""How far compressed trainings may be behind the synchronous one, and whether they are nearer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.compression_table.methods import DGC, POWERSGD
from bench.localsgd_table.methods import SYNCHRONOUS
from bench.localsgd_table.summary import Record

NEAR = {DGC: 0.3, POWERSGD: 0.5}
SEEDS = 3


def behind(row: Record | None, base: Record | None) -> tuple[float, int] | None:
    """By how many points a row is below the base, over the seeds that both have, and how many these are."""
    if row is None or base is None:
        return None
    own, other = (dict(zip(one["seeds"], one["test"], strict=True)) for one in (row, base))
    shared = [seed for seed in own if seed in other]
    if not shared:
        return None
    return round(statistics.fmean(other[seed] - own[seed] for seed in shared), 3), len(shared)


def accuracy_verdicts(rows: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """`holds` is None where something was not measured, or of fewer than three seeds."""
    found = {}
    for method, near in NEAR.items():
        points, seeds = behind(rows.get(method), rows.get(SYNCHRONOUS)) or (None, 0)
        found[method] = {
            "wanted": f"{method} is at most {near} points behind synchronous training, over {SEEDS} seeds",
            "numbers": {f"points behind, {seeds} seeds": points},
            "holds": None if points is None or seeds < SEEDS else points <= near,
        }
    return found
