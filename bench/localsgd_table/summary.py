"""What the lines of bench/localsgd_table say: steps by link, what a whole training would take there, accuracy, verdicts.

An update costs t, what a rank computes, and each averaging r more: t + r/k at a period of k. The two are fitted to the measured
k = 1 ... 16. A training of D synchronous updates, L local ones and R averagings then takes D*s + L*t + R*r, where s is the
measured synchronous step. So a method whose period changes has a throughput of its whole training.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.localsgd_table.methods import ADACOMM, ALONE, FIXED, METHODS, SYNCHRONOUS, TRAINED

Record = Mapping[str, Any]
NEAR, RIVAL = 0.25, "k4"


def fit(steps: Mapping[int, float]) -> tuple[float, float] | None:
    """(t, r) of step = t + r/k by least squares, from the step at each period k."""
    if len(steps) < 2:
        return None
    slope, intercept = statistics.linear_regression([1 / k for k in steps], list(steps.values()))
    return intercept, slope


def link_of(record: Record) -> str:
    """Rows of one table share it."""
    return f"{record['model']}, {record['hosts']} hosts, {record['rate_mbit']:g} Mbit/s"


def throughput(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By link: every method's last row, what they have in common, and the fit."""
    tables: dict[str, dict[str, Any]] = {}
    for link in sorted({link_of(r) for r in records}, key=lambda name: (name.split(",")[0], -float(name.split()[-2]))):
        own = [record for record in records if link_of(record) == link]
        last = {record["method"]: dict(record) for record in own}
        rows = {method: last[method] for method in METHODS if method in last}
        fixed = {k: rows[name]["step_ms"] for name, k in FIXED.items() if name in rows and "step_ms" in rows[name]}
        fitted = fit(fixed)
        tables[link] = {
            "rows": rows,
            "batch": own[-1]["batch"],
            "ranks": own[-1]["hosts"],
            "alone_ms": last[ALONE]["step_ms"] if ALONE in last else None,
            "fit_ms": None if fitted is None else [round(one, 3) for one in fitted],
            "fit_error": None if fitted is None else worst_error(fixed, fitted),
        }
    return tables


def worst_error(steps: Mapping[int, float], fitted: tuple[float, float]) -> float:
    """The largest share by which the fit is off."""
    t, r = fitted
    return round(max(abs((t + r / k) / step - 1) for k, step in steps.items()), 4)


def accuracy(records: Sequence[Record], methods: Sequence[str] = TRAINED) -> dict[str, dict[str, Any]]:
    """By method: the final runs with its last settings, over their seeds."""
    rows = {}
    for method in methods:
        own = [record for record in records if record["method"] == method and record["phase"] == "final"]
        if not own:
            continue
        last = own[-1]
        same = [r for r in own if all(r[name] == last[name] for name in ("strategy", "lr", "training"))]
        same = list({record["seed"]: record for record in same}.values())
        found = [record["accuracy"] for record in same]
        rounds = statistics.fmean(record["rounds"] for record in same)
        local = last["updates"] - last["dense_updates"]
        rows[method] = {
            "label": last["label"],
            "strategy": last["strategy"],
            "lr": last["lr"],
            "test": found,
            "seeds": [record["seed"] for record in same],
            "mean": round(statistics.fmean(found), 3),
            "spread": round(max(found) - min(found), 3),
            "updates": last["updates"],
            "dense_updates": last["dense_updates"],
            "rounds": round(rounds, 2),
            "mean_period": round(local / rounds, 3) if rounds else None,
            "periods": same[0]["periods"],
            "bytes_sent": round(statistics.fmean(record["bytes_sent"] for record in same)),
            "seconds": round(statistics.fmean(record["seconds"] for record in same), 2),
            "stopped": [record["stopped"] for record in same if record["stopped"]],
        }
    return rows


def training_ms(row: Record, table: Record) -> float | None:
    """Mean step of a whole training with this row's updates and averagings, between the hosts of this table."""
    dense = table["rows"].get(SYNCHRONOUS)
    if table["fit_ms"] is None or dense is None:
        return None
    t, r = table["fit_ms"]
    local = row["updates"] - row["dense_updates"]
    return float((row["dense_updates"] * dense["step_ms"] + local * t + row["rounds"] * r) / row["updates"])


def samples_per_s(step_ms: float | None, table: Record) -> float | None:
    return None if step_ms is None else round(table["ranks"] * table["batch"] / step_ms * 1e3, 2)


def whole_trainings(accuracies: Mapping[str, Record], tables: Mapping[str, Record]) -> dict[str, dict[str, float | None]]:
    """By link and method: samples a second over a whole training."""
    return {
        link: {method: samples_per_s(training_ms(row, table), table) for method, row in accuracies.items()}
        for link, table in tables.items()
    }


def verdicts(accuracies: Mapping[str, Record], tables: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """What was wanted, the numbers behind it, and whether it holds: None where something was not measured."""
    base, own = accuracies.get(SYNCHRONOUS), accuracies.get(ADACOMM)
    behind = None if base is None or own is None else round(base["mean"] - own["mean"], 3)
    found = {
        "accuracy": {
            "wanted": f"ADACOMM is at most {NEAR} points behind synchronous training",
            "numbers": {"synchronous, %": base and base["mean"], "ADACOMM, %": own and own["mean"], "behind": behind},
            "holds": None if behind is None else behind <= NEAR,
        }
    }
    for link, rates in whole_trainings(accuracies, tables).items():
        ours, rival = rates.get(ADACOMM), rates.get(RIVAL)
        found[f"throughput: {link}"] = {
            "wanted": f"over its whole training ADACOMM makes more samples a second than k = {FIXED[RIVAL]} ({link})",
            "numbers": {
                "ADACOMM": ours,
                f"k = {FIXED[RIVAL]}": rival,
                "measured in miniature, ADACOMM": measured(ADACOMM, tables[link]),
                f"measured, k = {FIXED[RIVAL]}": measured(RIVAL, tables[link]),
            },
            "holds": None if ours is None or rival is None else ours > rival,
        }
    return found


def measured(method: str, table: Record) -> float | None:
    rate: float | None = table["rows"].get(method, {}).get("samples_per_s")
    return rate


def told(one: Record) -> str:
    """A verdict in a line."""
    answer = {True: "yes", False: "NO", None: "not measured"}[one["holds"]]
    return f"{answer}: {one['wanted']}: " + ", ".join(f"{name} {number}" for name, number in one["numbers"].items())
