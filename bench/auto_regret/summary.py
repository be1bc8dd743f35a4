"""What the lines of bench/auto_regret say: how far each choice is from the best measured plan, how good the forecasts were.

measured    seconds of a sample: the mean of the two turns; the spread is their difference, in that mean
regret      measured(chosen) / measured(best) - 1, over all plans of the grid that the budget and the risk allow
pairs       of plans whose measured times differ by more than the larger of their spreads (in the faster one's time): how many
            are predicted in the right order. Their rank correlation is (right - wrong) / all: 1 is perfect, 0 is chance
unseen      plans that `auto` did not run itself
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from statistics import correlation, fmean, median
from typing import Any

Record = Mapping[str, Any]
RISKS = ("exact", "rounding", "lossy", "schedule")
EVERYTHING = "everything on"
PLAIN = ("fp32", "fp32, recompute")
"""No tuning: the first that fits."""
MEDIAN_REGRET, WORST_REGRET, LEAST_CORRELATION = 0.05, 0.15, 0.9
STEP_ERROR, PEAK_ERROR, PLANNING_S = 0.15, 0.05, 60.0


# --- pure -------------------------------------------------------------------------------------------------------------------


def spread(turns: Sequence[float]) -> float:
    return (max(turns) - min(turns)) / fmean(turns)


def ranks(numbers: Sequence[float]) -> list[float]:
    """From 1; equal numbers share the mean of their places."""
    ordered = sorted(numbers)
    return [1 + (ordered.index(one) + len(ordered) - 1 - ordered[::-1].index(one)) / 2 for one in numbers]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """None of fewer than three, or where all are alike."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return correlation(ranks(first), ranks(second))


def ordered_pairs(plans: Sequence[Mapping[str, float]]) -> tuple[int, int]:
    """Of plans with `measured`, `predicted` and `spread`: pairs that differ by more than the spread, and those in right order."""
    different = right = 0
    for one, other in itertools.combinations(plans, 2):
        fast, slow = sorted((one, other), key=lambda plan: plan["measured"])
        if slow["measured"] / fast["measured"] - 1 > max(one["spread"], other["spread"]):
            different += 1
            right += fast["predicted"] < slow["predicted"]
    return different, right


def allows(risk: str, plan: Record) -> bool:
    return RISKS.index(plan["risk"]) <= RISKS.index(risk)


# --- by cell ----------------------------------------------------------------------------------------------------------------


def finished(lines: Iterable[Record]) -> dict[tuple[str, float], list[Record]]:
    """By net and rate: the lines of the last run that came to its end."""
    by_run: dict[tuple[str, float, Any], list[Record]] = {}
    for line in lines:
        by_run.setdefault((line["model"], line["rate_mbit"], line["run"]), []).append(line)
    return {(model, rate): own for (model, rate, _), own in by_run.items() if own[-1]["kind"] == "end"}


def plans_of(lines: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By name, with seconds of a sample in both turns."""
    found = {line["name"]: dict(line, turns=[], updates=[]) for line in lines if line["kind"] == "plan"}
    for line in lines:
        if line["kind"] == "time":
            plan = found[line["name"]]
            plan["turns"].append(line["seconds"] / plan["samples"])
            plan["updates"].append(line["updates"])
    for plan in found.values():
        plan["measured"], plan["spread"] = fmean(plan["turns"]), spread(plan["turns"])
    return found


def kept_to(plan: Record, budget: int | None) -> bool:
    """Of a plan with recompute: made for this budget. Where its memory was not measured it is out of the question anyway."""
    if budget is None:
        return plan["budget"] is None
    return plan["budget"] in (None, budget) and plan["peak_bytes"] is not None and plan["peak_bytes"] <= budget


def regret_of(plan: Record | None, best: Record) -> float | None:
    return None if plan is None else plan["measured"] / best["measured"] - 1


def judged(asked: Record, plans: Mapping[str, Record]) -> dict[str, Any]:
    """One question to `auto`."""
    budget = asked["budget"]
    fitting = {name: one for name, one in plans.items() if kept_to(one, budget)}
    legal = {name: one for name, one in fitting.items() if name != EVERYTHING and allows(asked["risk"], one)}
    best, chosen = min(legal.values(), key=lambda one: one["measured"]), plans[asked["chosen"]]
    plain = next((legal[name] for name in PLAIN if name in legal), None)
    known = [foreseen(plan, told) for told in asked["forecasts"].values() if (plan := legal.get(told.get("name", "")))]
    unseen = [one for one in known if one["name"] not in asked["tried"]]
    different, right = ordered_pairs(known)
    drift = drift_of(asked["tried"], plans)
    over = budget is not None and max(chosen["peak_bytes"] or 0, asked["chosen_peak_bytes"] or 0) > budget
    by_forecast = min(known, key=lambda one: one["predicted"], default=None)
    return {
        **{key: asked[key] for key in ("model", "rate_mbit", "budget", "risk", "chosen", "hidden_share", "missing")},
        **{"planning_s": asked["seconds"], "is_over_budget": over, "legal": len(legal)},
        "best": best["name"],
        "chosen_us": 1e6 * chosen["measured"],
        "best_us": 1e6 * best["measured"],
        "regret": max(0.0, regret_of(chosen, best) or 0.0),
        "regret_by_forecast": by_forecast and by_forecast["measured"] / best["measured"] - 1,
        "regret_no_tuning": regret_of(plain, best),
        "regret_everything": regret_of(plans.get(EVERYTHING), best),
        "everything_fits": EVERYTHING in fitting,
        "spread": median(one["spread"] for one in legal.values()),
        "best_spread": best["spread"],
        "foretold": len(known),
        "foretold_otherwise": sum("name" in told and told["name"] not in fitting for told in asked["forecasts"].values()),
        "spearman": spearman([one["predicted"] for one in known], [one["measured"] for one in known]),
        **{"pairs": different, "pairs_right": right},
        "drift": drift,
        "step_errors": {one["name"]: one["predicted"] / one["measured"] - 1 for one in unseen},
        "step_errors_without_drift": {one["name"]: one["predicted"] / one["measured"] / drift - 1 for one in unseen},
        "peak_errors": {one["name"]: one["predicted_bytes"] / one["peak_bytes"] - 1 for one in unseen if one["peak_bytes"]},
    }


def drift_of(tried: Mapping[str, float | None], plans: Mapping[str, Record]) -> float:
    """How many times as long everything took while `auto` planned as it did when the grid was measured: by the plans that both
    have run. Other tenants of a machine make it slower for minutes, and then faster again."""
    both = [
        seconds / (plans[name]["measured"] * plans[name]["samples"])
        for name, seconds in tried.items()
        if seconds and name in plans
    ]
    return median(both) if both else 1.0


def foreseen(plan: Record, told: Record) -> dict[str, Any]:
    return {**plan, "predicted": told["seconds"] / plan["samples"], "predicted_bytes": told["peak_bytes"]}


# --- of all -----------------------------------------------------------------------------------------------------------------


def errors_of(found: Iterable[float]) -> dict[str, Any]:
    return errors_within([abs(one) for one in found])


def errors_within(sizes: Sequence[float]) -> dict[str, Any]:
    if not sizes:
        return {"count": 0, "median": None, "worst": None}
    return {"count": len(sizes), "median": median(sizes), "worst": max(sizes)}


def share_within(sizes: Iterable[float], limit: float) -> float | None:
    found = [abs(one) <= limit for one in sizes]
    return sum(found) / len(found) if found else None


def totals(cells: Sequence[Record]) -> dict[str, Any]:
    steps = [error for cell in cells for error in cell["step_errors"].values()]
    steady = [error for cell in cells for error in cell["step_errors_without_drift"].values()]
    room = [error for cell in cells for error in cell["peak_errors"].values()]
    pairs, right = (sum(cell[key] for cell in cells) for key in ("pairs", "pairs_right"))
    orders = [cell["spearman"] for cell in cells if cell["spearman"] is not None]
    return {
        "cells": len(cells),
        **{name: errors_within([cell[name] for cell in cells if cell[name] is not None]) for name in REGRETS},
        "over_budget": sum(cell["is_over_budget"] for cell in cells),
        "planning_s": max((cell["planning_s"] for cell in cells), default=None),
        "spread": errors_within([cell["spread"] for cell in cells]),
        "spearman": {"median": median(orders), "least": min(orders)} if orders else None,
        **{"pairs": pairs, "pairs_right": right, "pair_correlation": (2 * right - pairs) / pairs if pairs else None},
        "step_error": {**errors_of(steps), "within": share_within(steps, STEP_ERROR)},
        "step_error_without_drift": {**errors_of(steady), "within": share_within(steady, STEP_ERROR)},
        "drift": errors_of(cell["drift"] - 1 for cell in cells),
        "peak_error": {**errors_of(room), "within": share_within(room, PEAK_ERROR)},
    }


REGRETS = ("regret", "regret_by_forecast", "regret_no_tuning", "regret_everything")


def verdicts(total: Record) -> dict[str, dict[str, Any]]:
    """What was wanted, the numbers behind it, and whether it holds: None where nothing was measured."""
    regret, step, peak, order = total["regret"], total["step_error"], total["peak_error"], total["pair_correlation"]
    if not total["cells"]:
        return {}
    return {
        "median regret": _at_most(f"median regret at most {MEDIAN_REGRET:.0%}", regret["median"], MEDIAN_REGRET),
        "worst regret": _at_most(f"worst regret at most {WORST_REGRET:.0%}", regret["worst"], WORST_REGRET),
        "memory": _at_most("no choice over its memory budget", total["over_budget"], 0),
        "order": {
            "wanted": f"rank correlation at least {LEAST_CORRELATION} over pairs that differ by more than the spread",
            "numbers": {"correlation": order, "pairs": total["pairs"], "in the right order": total["pairs_right"]},
            "holds": None if order is None else order >= LEAST_CORRELATION,
        },
        "planning": _at_most(f"planning takes at most {PLANNING_S:g} s", total["planning_s"], PLANNING_S),
        "step": _within(f"step time of plans that were not run predicted within {STEP_ERROR:.0%}", step, STEP_ERROR),
        "steady step": _within(
            "the same, with the machine's own drift taken out, by the plans that were run both then and later",
            total["step_error_without_drift"],
            STEP_ERROR,
        ),
        "peak": _within(f"their peak memory within {PEAK_ERROR:.0%}", peak, PEAK_ERROR),
    }


def _at_most(wanted: str, number: float | None, limit: float) -> dict[str, Any]:
    return {"wanted": wanted, "numbers": {"measured": number}, "holds": None if number is None else number <= limit}


def _within(wanted: str, found: Record, limit: float) -> dict[str, Any]:
    """All of them; the median and the share say how near it is."""
    numbers = {"plans": found["count"], "median": found["median"], "worst": found["worst"], "share within": found["within"]}
    return {"wanted": wanted, "numbers": numbers, "holds": None if not found["count"] else found["worst"] <= limit}


def summary(lines: Iterable[Record]) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    grids: list[dict[str, Any]] = []
    for own in finished(lines).values():
        plans = plans_of(own)
        cells += [judged(line, plans) for line in own if line["kind"] == "asked"]
        head = next(line for line in own if line["kind"] == "cell")
        refused = [line for line in own if line["kind"] == "refused"]
        grids.append({"cell": head, "plans": list(plans.values()), "refused": refused, "seconds": own[-1]["at_s"]})
    total = totals(cells)
    return {"totals": total, "verdicts": verdicts(total), "cells": cells, "grids": grids}
