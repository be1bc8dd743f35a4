"""What `fleetx plan` does: have a plan, measured now or read from a file, and tell what would change it."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import fleet
from ..auto import plan as plans
from ..auto.chart import draw, require_matplotlib
from ..auto.plan import Plan
from ..auto.what_if import Question, candidate_of, curves, link_for, what_if
from ..dist.roles import role_from_env
from ..dist.wire_cost import Link
from ..errors import ConfigError
from .plan_text import curves_text, curves_title, how_to_use, link_notes, outlook_text
from .target import target_of

MEASURES = ("trials", "batch", "out", "strategy")
"""Flags that mean something only where something is measured."""
NO_LINK = Link(1, math.inf)


def run_plan(options: argparse.Namespace, changes: Mapping[str, Any]) -> None:
    """Only rank 0 tells anything."""
    if options.chart is not None:
        require_matplotlib()
    is_file = options.target.endswith(".json")
    plan = _plan_of_file(options) if is_file else _plan_of_model(options, changes)
    if role_from_env(os.environ).rank != 0:
        return
    if is_file:
        print(replace(plan, reused_from=""), flush=True)  # the table, and not only where it comes from
    print("\n" + how_to_use(plan), flush=True)
    if options.out is not None:
        _save(plan, options.out)
    question = _question(options, changes, {**plan.key.get("asked", {}), "memory": plan.memory})
    here = _for_here(question, options, ranks=plan.measured.ranks)
    if _asks_more(options, here, changes):
        print("\n" + outlook_text(plan, what_if(plan.measured, here, plan.fixed)), flush=True)
    if options.chart is not None or {"bandwidth", "latency", "world"} & set(changes):
        _tell_worlds(plan, question, options.chart)


def _plan_of_file(options: argparse.Namespace) -> Plan:
    for name in MEASURES:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} is for a plan that is measured; {options.target} is one that was.")
    return plans.load(options.target)


def _plan_of_model(options: argparse.Namespace, changes: Mapping[str, Any]) -> Plan:
    """Measured here, on all ranks there are."""
    fleet.init()
    if fleet.worker_num() == 1:
        _require_link(options, changes)
    target = target_of(options.target, rows=options.batch, rank=fleet.worker_index())
    asked = {"risk": options.risk, "memory": options.memory, "global_batch": options.global_batch, "trials": options.trials}
    given = {name: value for name, value in asked.items() if value is not None}
    strategy = fleet.DistributedStrategy() if options.strategy is None else fleet.DistributedStrategy.load(options.strategy)
    strategy.auto, strategy.auto_configs = True, given
    if not any(part.name == "auto" for part in strategy.parts()):
        raise ConfigError(
            f"{options.strategy} sets `localsgd` alone, and that beside `auto` is the older spelling of `adaptive_localsgd`. To "
            "plan around it, ask for something other than the default too, such as --trials 2."
        )
    _, optimizer = fleet.distribute(target.model, target.optimizer, strategy, sample=target.sample, loss_fn=target.loss_fn)
    assert optimizer.plan is not None
    return optimizer.plan


def _require_link(options: argparse.Namespace, changes: Mapping[str, Any]) -> None:
    """One rank measures none: what is missing is better told now than after measuring all the rest."""
    question = _question(options, changes, {})
    if options.chart is not None:
        question = replace(question, world=max(2, question.world or 0))
    link_for(NO_LINK, question)


def _save(plan: Plan, path: str) -> None:
    try:
        plan.save(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the plan cannot be written to {path}: {error}.") from None
    print(f"plan written to {path}", flush=True)


# --- what if ----------------------------------------------------------------------------------------------------------------


def _question(options: argparse.Namespace, changes: Mapping[str, Any], before: Mapping[str, Any]) -> Question:
    """What is not asked now is as the plan was asked for."""
    return Question(
        risk=options.risk or before.get("risk", "rounding"),
        memory=changes.get("memory", options.memory or before.get("memory")),
        global_batch=options.global_batch or before.get("global_batch"),
        bytes_per_s=changes.get("bandwidth"),
        latency_s=changes.get("latency"),
        world=changes.get("world"),
    )


def _for_here(question: Question, options: argparse.Namespace, *, ranks: int) -> Question:
    """A link without a number of ranks, of a plan that knows one rank, is for the chart alone."""
    if options.chart is not None and ranks == 1 and question.world is None:
        return replace(question, bytes_per_s=None, latency_s=None)
    return question


def _asks_more(options: argparse.Namespace, question: Question, changes: Mapping[str, Any]) -> bool:
    """A plan that was just measured has answered the flags already; one of a file was made for others."""
    of_link = (question.bytes_per_s, question.latency_s, question.world)
    is_other = any(one is not None for one in of_link) or "memory" in changes
    return is_other or (options.target.endswith(".json") and any((options.risk, options.memory, options.global_batch)))


def _tell_worlds(plan: Plan, question: Question, chart: str | None) -> None:
    several = replace(question, world=max(2, question.world or plan.measured.ranks))
    link = link_for(plan.measured.link.link(), several)
    found = curves(plan.measured, candidate_of(plan), question, fixed=plan.fixed)
    title = curves_title(plan, link)
    print("\n".join(["", curves_text(title, found), *link_notes(plan.measured, question)]), flush=True)
    if chart is not None:
        draw(chart, found, title)
        print(f"chart written to {chart}", flush=True)
