"""The sections in words: strategies and environments side by side, and what workers wrote last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import curves
from .logs import log_tails
from .markup import Markup, tag
from .read import Run
from .show import Show, section
from .tables import side_by_side


def strategy(show: Show) -> Markup | None:
    heads, columns = [], []
    for run in show.runs:
        for pair, settings in run.strategies.items():
            model = curves.model_name(run, pair)
            heads.append(run.name if len(run.strategies) == 1 else f"{run.name} · {model}")
            columns.append(settings)
    return section("Strategy", side_by_side(heads, columns, "settings") if columns else None, key="strategy", is_grid=False)


def environment_row(run: Run) -> dict[str, Any]:
    """Of the last start: what ran, where, how."""
    last: Mapping[str, Any] = run.starts[-1] if run.starts else {}
    found = {name: last.get(name) for name in ("fleetx", "torch", "python", "platform", "device", "backend", "ranks", "nodes")}
    for name in ("hosts", "command"):
        given = last.get(name)
        found[name] = " ".join(map(str, given)) if isinstance(given, list) else given
    given = last.get("pairs")
    pairs = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    for place, one in enumerate(pairs, start=1):
        end = f" {place}" if len(pairs) > 1 else ""
        found |= {f"{name}{end}": one.get(name) for name in ("model", "parameters", "optimizer")}
    found["total_steps"] = last.get("total_steps")
    found["started"] = ", ".join(str(start.get("time")) for start in run.starts if start.get("time"))
    found["folder"] = str(run.folder)
    return {name: value for name, value in found.items() if value not in (None, "")}


def environment(show: Show) -> Markup | None:
    columns = [environment_row(run) for run in show.runs]
    table = side_by_side([run.name for run in show.runs], columns, "facts")
    return section("Environment", table, key="environment", is_grid=False)


def failures(show: Show) -> Markup | None:
    """The last lines of the workers, of runs that failed or ended without a word."""
    found = []
    for run, facts in zip(show.runs, show.facts, strict=True):
        if facts.state not in ("failed", "no end written"):
            continue
        found += [tag("p", f"{run.name}: {facts.error}", class_="finding")] if facts.error else []
        for rank, text in log_tails(run.folder).items():
            head = tag("summary", f"{run.name}, worker {rank}" if len(show.runs) > 1 else f"worker {rank}")
            found.append(tag("details", head, tag("pre", text, tabindex=0), open=facts.state == "failed" and len(show.runs) == 1))
    return section("Last lines of the worker logs", *found, key="failures", is_grid=False)
