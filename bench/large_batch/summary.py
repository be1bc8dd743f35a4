"""What the runs of bench/large_batch say: the best settings of each cell, its mean and spread over seeds, the verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.large_batch.recipe import OPTIMIZERS, Trial, trial_from

Record = Mapping[str, Any]  # one run, as it stands in the file of runs
BASE, MIDDLE, LARGE, LARGE_SGD = "sgd@512", "lars@2048", "lars@8192", "sgd@8192"
ACCURATE, NEAR_MIDDLE, NEAR_LARGE = 93.0, 0.3, 1.5


def cell_of(record: Record) -> str:
    return trial_from(record["trial"], "a run").cell


def best_trial(records: Iterable[Record], cell: str) -> Trial | None:
    """The settings with the best accuracy on held-out images; the earlier one of two equals."""
    tuned = [record for record in records if record["phase"] == "tune" and cell_of(record) == cell]
    if not tuned:
        return None
    return trial_from(max(tuned, key=lambda record: record["accuracy"])["trial"], "a run")


def summarise(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By cell: how many trials, what was chosen, and the test accuracy of the chosen settings over the seeds."""
    cells = {}
    for cell in ordered({cell_of(record) for record in records}):
        own = [record for record in records if cell_of(record) == cell]
        tuned = [record["accuracy"] for record in own if record["phase"] == "tune"]
        chosen = best_trial(own, cell) or trial_from(own[-1]["trial"], "a run")
        finals = [r["accuracy"] for r in own if r["phase"] == "final" and r["trial"] == chosen.settings()]
        cells[cell] = {
            "trials": len(tuned),
            "stopped": sum(record["phase"] == "tune" and record["stopped"] is not None for record in own),
            "chosen": chosen.settings(),
            "held_out": max(tuned, default=None),
            "test": finals,
            "mean": round(statistics.fmean(finals), 3) if finals else None,
            "spread": round(max(finals) - min(finals), 3) if finals else None,
        }
    return cells


def ordered(cells: Iterable[str]) -> list[str]:
    """By optimizer, then by batch as a number."""
    pairs = [cell.split("@") for cell in cells]
    return [f"{name}@{batch}" for name, batch in sorted(pairs, key=lambda pair: (OPTIMIZERS.index(pair[0]), int(pair[1])))]


def verdicts(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was wanted, the number behind it, and whether it holds: None where a cell was not measured."""

    def mean(cell: str) -> float | None:
        return cells[cell]["mean"] if cell in cells else None

    def behind(cell: str) -> float | None:
        base, own = mean(BASE), mean(cell)
        return None if base is None or own is None else round(base - own, 3)

    accurate, middle, large = mean(BASE), behind(MIDDLE), behind(LARGE)
    lars, sgd = mean(LARGE), mean(LARGE_SGD)
    lead = None if lars is None or sgd is None else round(lars - sgd, 3)
    spread = None if lead is None else max(cells[LARGE]["spread"], cells[LARGE_SGD]["spread"])
    return {
        "sgd_512": verdict(f"{BASE} reaches {ACCURATE:g} %", accurate, None if accurate is None else accurate >= ACCURATE),
        "lars_2048": verdict(
            f"{MIDDLE} is at most {NEAR_MIDDLE:g} points behind {BASE}", middle, None if middle is None else middle <= NEAR_MIDDLE
        ),
        "lars_8192": verdict(
            f"{LARGE} is at most {NEAR_LARGE:g} points behind {BASE}", large, None if large is None else large <= NEAR_LARGE
        ),
        "lars_over_sgd_8192": verdict(
            f"{LARGE} is ahead of {LARGE_SGD} by more than the larger spread of the two"
            + ("" if spread is None else f", {shown(spread)}"),
            lead,
            None if lead is None or spread is None else lead > spread,
        ),
    }


def verdict(wanted: str, number: float | None, holds: bool | None) -> dict[str, Any]:
    return {"wanted": wanted, "number": number, "holds": holds}


def told(one: Mapping[str, Any]) -> str:
    """A verdict in a line."""
    if one["holds"] is None:
        return f"not measured: {one['wanted']}"
    return f"{'yes' if one['holds'] else 'NO':3} {one['wanted']}: {one['number']}"


def shown(number: float | None, digits: int = 2) -> str:
    return "not measured" if number is None else f"{number:.{digits}f}"
