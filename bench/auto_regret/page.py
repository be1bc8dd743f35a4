"""docs/auto_regret.md, made from what bench/auto_regret published: nothing in it is written by hand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.auto_bert.page import in_words_of_the_page, section
from bench.auto_regret.summary import Record, allows
from bench.large_batch.page import table
from bench.lib.bar_chart import Bar, bar_chart, folded
from bench.localsgd_table.page import MISSING

PAGE = """\
# `auto`: how far from the best

<!-- Made from measured figures by `python -m bench.auto_regret.run --table`; do not edit. -->

{result}

{chart}

`strategy.auto` measures the model and the network, predicts every plan, runs the best few, and chooses. This page compares its
choices with the best of a fixed grid of plans, every one of which was measured.

## The choices

{choices}

Regret is how much longer a sample takes than under the best plan of the grid that budget and risk allow. "By the forecast alone"
is the regret of the plan that was predicted to be the fastest, had none been run. "No tuning" is float32 with a dense all-reduce,
and with recompute where it does not fit without. "Everything on" is 16-bit amp, every block computed again, four micro-batches
merged and DGC; where it does not fit, its time is in brackets.

## The forecasts

{forecasts}

Plans that `auto` has run itself are not among the errors. The grid is measured minutes after `auto` has, on a machine that others
use too: drift is how much longer the plans that both have run took while `auto` planned. Of pairs of plans whose measured times
differ by more than the larger of their two spreads, it is said how many are in the right order; the rank correlation above is
(right - wrong) / all of these pairs. Spearman is over all plans with a forecast. Without one are:

{missing}

{bert}
## How it was measured

{explanation}

{verdicts}

## Every plan

{grids}
"""

EXPLANATION = """\
- **Where** ({device}, torch {torch}, commit {commit}): two hosts are network namespaces with a link of the given rate to one
  switch, one rank with one thread on each. SGD with momentum. Nets: {nets}.
- **The grid**: precision (float32, bfloat16) x micro-batches merged (1, 4) x reducer (dense, `bf16_allreduce`, `powersgd` of rank
  4, `dgc` at 0.999, `localsgd` of period 8), each as it is, and where it does not fit
  as it is with the blocks computed again that `auto` would choose.
  `auto` chose from the same: its lists of merges and of reducers were set to those of the grid. PowerSGD is timed without its
  dense first updates.
- **Budgets** lie halfway between the least peak that recompute can reach and the peak of a plain float32 step. Bytes are counted.
- **Times**: all plans live in the same processes and go in turns, twice over the whole grid, the second time the other way round;
  in each turn one update to warm up and several timed ones (of Local SGD whole periods), of which the mean of the faster half
  counts, on the slowest rank. The spread is the difference of the two turns in their mean. Slow 16-bit updates are timed
  once in a turn; of Local SGD one update and one averaging.
- **Left out**: memory, and recompute, of 16-bit plans that take three times as long as the fastest plan or more. They cannot be
  the best, and computing again would only make them slower."""


def percent(number: float | None, digits: int = 1) -> str:
    return MISSING if number is None else f"{100 * number:.{digits}f} %"


def place(cell: Record) -> list[str]:
    memory = "no limit" if cell["budget"] is None else f"{cell['budget'] / 1e6:,.1f} MB"
    return [cell["model"], f"{cell['rate_mbit']:g}", memory, cell["risk"]]


def verdict_table(verdicts: Mapping[str, Record]) -> str:
    answers = {True: "yes", False: "**no**", None: MISSING}
    body = []
    for one in verdicts.values():
        numbers = ", ".join(f"{name}: {_shown(value)}" for name, value in one["numbers"].items())
        body.append([in_words_of_the_page(one["wanted"]), numbers, answers[one["holds"]]])
    return table(["wanted", "measured", "holds"], body)


def _shown(number: float | None) -> str:
    return MISSING if number is None else f"{number:,}" if isinstance(number, int) else f"{number:.3f}"


def choice_table(cells: list[Record]) -> str:
    header = ["net", "Mbit/s", "memory", "risk", "chosen", "us a sample", "best measured", "us a sample", "regret"]
    header += ["by the forecast alone", "no tuning", "everything on", "spread", "planned in"]
    body = []
    for cell in cells:
        all_on = percent(cell["regret_everything"], 0)
        regrets = [percent(cell[key]) for key in ("regret", "regret_by_forecast")] + [percent(cell["regret_no_tuning"], 0)]
        head = [*place(cell), cell["chosen"], f"{cell['chosen_us']:,.0f}", cell["best"], f"{cell['best_us']:,.0f}"]
        ends = [all_on if cell["everything_fits"] else f"({all_on})", percent(cell["spread"]), f"{cell['planning_s']:.0f} s"]
        body.append([*head, *regrets, *ends])
    return table(header, body)


def forecast_table(cells: list[Record]) -> str:
    header = ["net", "Mbit/s", "memory", "risk", "plans", "Spearman", "pairs in the right order"]
    header += ["step time: median error", "worst", "drift", "without it: median error", "worst"]
    header += ["peak memory: median error", "worst"]
    body = []
    for cell in cells:
        spearman = MISSING if cell["spearman"] is None else f"{cell['spearman']:.3f}"
        pairs = f"{cell['pairs_right']} of {cell['pairs']}"
        steps, steady, room = (_errors(cell[f"{key}"]) for key in ("step_errors", "step_errors_without_drift", "peak_errors"))
        errors = [*steps, percent(cell["drift"] - 1), *steady, *room]
        body.append([*place(cell), f"{cell['foretold']} of {cell['legal']}", spearman, pairs, *errors])
    return table(header, body)


def _errors(found: Mapping[str, float]) -> list[str]:
    """Median and worst."""
    sizes = sorted(abs(error) for error in found.values())
    return [percent(sizes[len(sizes) // 2]), percent(sizes[-1])] if sizes else [MISSING, MISSING]


def grid_table(grid: Record, cells: list[Record]) -> str:
    head = grid["cell"]
    own = [cell for cell in cells if (cell["model"], cell["rate_mbit"]) == (head["model"], head["rate_mbit"])]
    title = f"### {head['model']}, {head['rate_mbit']:g} Mbit/s (one TCP connection carries {head['goodput_mbit']:g})"
    body = []
    for plan in sorted(grid["plans"], key=lambda one: one["measured"]):
        peak = MISSING if plan["peak_bytes"] is None else f"{plan['peak_bytes'] / 1e6:,.1f}"
        chosen = ", ".join(_asked(cell) for cell in own if cell["chosen"] == plan["name"] and allows(cell["risk"], plan))
        turns = [f"{1e6 * seconds:,.1f}" for seconds in plan["turns"]]
        body.append([plan["name"], *turns, percent(plan["spread"]), " + ".join(map(str, plan["updates"])), peak, chosen])
    refused = [f"- {one['name']}: {one['why']}" for one in grid["refused"]]
    header = ["plan", "us a sample, first turn", "second", "spread", "updates timed", "peak, MB", "chosen for"]
    return "\n\n".join([title, table(header, body), *(["\n".join(["Refused:", "", *refused])] if refused else [])])


def _asked(cell: Record) -> str:
    return f"{'no limit' if cell['budget'] is None else 'tight'}, {cell['risk']}"


def missing_list(cells: list[Record]) -> str:
    """What `auto` did not measure to the end, and why."""
    found = [
        f"- {name}, {cell['model']} at {cell['rate_mbit']:g} Mbit/s: {why}" for cell in cells for name, why in _missing(cell)
    ]
    return "\n".join(dict.fromkeys(found)) or "- none."


def _missing(cell: Record) -> list[tuple[str, str]]:
    return sorted(cell["missing"].items()) if cell["budget"] is None else []


def nets(grids: list[Record]) -> str:
    found = {one["cell"]["model"]: one["cell"] for one in grids}
    return "; ".join(f"{name} ({cell['about']}, {cell['numel']:,} parameters)" for name, cell in found.items())


KEYS = {"regret": "auto", "regret_by_forecast": "by the forecast alone", "regret_no_tuning": "no tuning"}


def medians(cells: list[Record]) -> dict[str, float]:
    """Return the median regret over all cells, by key."""
    known = {key: [cell[key] for cell in cells if cell[key] is not None] for key in KEYS}
    return {key: statistics.median(found) for key, found in known.items() if found}


def result(cells: list[Record]) -> str:
    found = medians(cells)
    if len(found) < len(KEYS):
        return f"The choices were {MISSING}."
    return (
        f"**In the median of {len(cells)} cases the plan that `auto` chooses is {percent(found['regret'])} slower than the best "
        f"of the grid; a plain float32 run is {percent(found['regret_no_tuning'], 0)} slower.**"
    )


def chart(cells: list[Record]) -> str:
    bars = [Bar(KEYS[key], max(value, 0.0), percent(value), key == "regret") for key, value in medians(cells).items()]
    return bar_chart("Slower than the best plan of the grid, median", bars) if bars else ""


def page(figures: Mapping[str, Any], bert: Mapping[str, Any] | None = None) -> str:
    """`bert`: what bench/auto_bert published."""
    cells, grids = figures["cells"], figures["grids"]
    return PAGE.format(
        result=result(cells),
        chart=chart(cells),
        verdicts=folded(
            "What was wanted of these figures, and whether it holds",
            verdict_table(figures["verdicts"]) if cells else f"The choices were {MISSING}.",
        ),
        choices=choice_table(cells),
        forecasts=forecast_table(cells),
        missing=missing_list(cells),
        bert="" if bert is None else section(bert),
        explanation=EXPLANATION.format(**figures, nets=nets(grids)),
        grids=folded("All plans of all grids", "\n\n".join(grid_table(one, cells) for one in grids)),
    )
