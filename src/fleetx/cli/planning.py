"""Run `fleetx plan`: measure a plan or read one from a file, print it, and predict what would change it."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import fleet
from ..auto import plan as plans
from ..auto.chart import draw, require_matplotlib
from ..auto.measurements import Forecast, Measured
from ..auto.plan import Plan
from ..auto.what_if import Curve, Outlook, Question, candidate_of, curves, link_for, same_plan, what_if
from ..config.text import MIB, aligned, binary, listed
from ..dist.launch_variables import role_from_env
from ..dist.predicted_cost import Link
from ..errors import ConfigError
from ..strategy import DistributedStrategy
from .target import target_of

MEASURES = ("trials", "batch", "out", "strategy")
"""Flags that mean something only where something is measured."""
NO_LINK = Link(1, math.inf)


def run_plan(options: argparse.Namespace, changes: Mapping[str, Any]) -> None:
    """Run the command; only rank 0 prints."""
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
        _print_worlds(plan, question, options.chart)


def _plan_of_file(options: argparse.Namespace) -> Plan:
    for name in MEASURES:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} is for a plan that is measured; {options.target} is one that was.")
    return plans.load(options.target)


def _plan_of_model(options: argparse.Namespace, changes: Mapping[str, Any]) -> Plan:
    """Measure a plan here, on all ranks there are."""
    fleet.init()
    if fleet.worker_num() == 1:
        _require_link(options, changes)
    target = target_of(options.target, rows=options.batch, rank=fleet.worker_index())
    asked = {"risk": options.risk, "memory": options.memory, "global_batch": options.global_batch, "trials": options.trials}
    given = {name: value for name, value in asked.items() if value is not None}
    strategy = fleet.DistributedStrategy() if options.strategy is None else fleet.DistributedStrategy.load(options.strategy)
    strategy.auto = True
    for name, value in given.items():
        strategy.auto_configs[name] = value  # type: ignore[literal-required]  # of the names just listed
    if not any(part.name == "auto" for part in strategy.parts()):
        raise ConfigError(
            f"{options.strategy} sets `localsgd` alone, and that beside `auto` is the older spelling of `adaptive_localsgd`. To "
            "plan around it, ask for something other than the default too, such as --trials 2."
        )
    _, optimizer = fleet.distribute(target.model, target.optimizer, strategy, sample=target.sample, loss_fn=target.loss_fn)
    assert optimizer.plan is not None
    return optimizer.plan


def _require_link(options: argparse.Namespace, changes: Mapping[str, Any]) -> None:
    """Refuse questions about a link that one rank cannot measure, before all the rest is measured."""
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
    """Read the question off the flags; what they do not say is as the plan was asked for."""
    return Question(
        risk=options.risk or before.get("risk", "rounding"),
        memory=changes.get("memory", options.memory or before.get("memory")),
        global_batch=options.global_batch or before.get("global_batch"),
        bytes_per_s=changes.get("bandwidth"),
        latency_s=changes.get("latency"),
        world=changes.get("world"),
    )


def _for_here(question: Question, options: argparse.Namespace, *, ranks: int) -> Question:
    """Leave out a link without a number of ranks where the plan knows one rank: it is for the chart alone."""
    if options.chart is not None and ranks == 1 and question.world is None:
        return replace(question, bytes_per_s=None, latency_s=None)
    return question


def _asks_more(options: argparse.Namespace, question: Question, changes: Mapping[str, Any]) -> bool:
    """Return whether flags ask for more than the plan says: one just measured has answered them, one of a file was made for
    others."""
    of_link = (question.bytes_per_s, question.latency_s, question.world)
    is_other = any(one is not None for one in of_link) or "memory" in changes
    return is_other or (options.target.endswith(".json") and any((options.risk, options.memory, options.global_batch)))


def _print_worlds(plan: Plan, question: Question, chart: str | None) -> None:
    several = replace(question, world=max(2, question.world or plan.measured.ranks))
    link = link_for(plan.measured.link.link(), several)
    found = curves(plan.measured, candidate_of(plan), question, fixed=plan.fixed)
    title = curves_title(plan, link)
    print("\n".join(["", curves_text(title, found), *link_notes(plan.measured, question)]), flush=True)
    if chart is not None:
        draw(chart, found, title)
        print(f"chart written to {chart}", flush=True)


# --- Forecasts of other links, ranks and memory, as text --------------------------------------------------------------

SHOWN = 12
"""Most forecasts of a table; the rest are counted."""
SHOWN_WORLDS = (2, 8, 64, 512, 4096)
UNKNOWN = "(work not measured)"


def how_to_use(plan: Plan) -> str:
    """Say what to write into a script."""
    plain, settings = DistributedStrategy().to_dict(), plan.strategy.to_dict()
    said = [f"{name}={value!r}" for name, value in settings.items() if name not in plain or value != plain[name]]
    loader = f" Let the loader give {plan.micro_batch} rows." if plan.micro_batch else ""
    if not said:
        return f"to use it: plain training is the answer; fleet.distribute(model, optimizer) needs no strategy.{loader}"
    return f"to use it: strategy = fleet.DistributedStrategy({', '.join(said)}).{loader}"


def outlook_text(plan: Plan, outlook: Outlook) -> str:
    chosen = outlook.chosen
    head = f"what if: {conditions(outlook.link, outlook.question.memory)}: {chosen.candidate.name}"
    shown = list(outlook.forecasts[:SHOWN])
    shown += [chosen] if chosen not in shown else []
    rows = [_cells(one, outlook) for one in shown]
    columns = ["", "plan", "predicted ms", "samples/s", "predicted MiB", "MB sent", "risk"]
    table = aligned([columns, *rows], left=(1, 6))
    more = len(outlook.forecasts) - len(shown)
    rest = [f"  and {more} more, slower for a sample."] if more else []
    refused = _refused(outlook.refused)
    return "\n".join([head, *table, *rest, f"  {what_changed(plan, outlook)}", *refused, *notes(outlook)])


def _cells(one: Forecast, outlook: Outlook) -> list[str]:
    return [
        "*" if one is outlook.chosen else " ",
        one.candidate.name,
        f"{1e3 * one.cost.seconds:,.1f}",
        f"{one.samples / one.cost.seconds:,.1f}",
        f"{one.peak_bytes / MIB:,.1f}" if one.peak_bytes else "-",
        f"{one.cost.bytes_sent / 1e6:,.2f}",
        one.candidate.risk.value + ("" if outlook.is_measured(one) else f" {UNKNOWN}"),
    ]


def what_changed(plan: Plan, outlook: Outlook) -> str:
    """Compare the plan as measured with the choice, in one sentence."""
    chosen, before = outlook.chosen, candidate_of(plan)
    there = f"as measured ({conditions(plan.measured.link.link(), None)}) {plan.chosen} was taken"
    same = same_plan(outlook, before)
    here = f"{chosen.samples / chosen.cost.seconds:,.1f} samples/s"
    if same is chosen:
        return f"the same: {there}; here it makes {here}, an update of {chosen.samples:,} in {1e3 * chosen.cost.seconds:,.1f} ms."
    there_now = f"it {same}" if isinstance(same, str) else f"it would make {same.samples / same.cost.seconds:,.1f} samples/s"
    return f"changed: {there}; here {there_now}, and {chosen.candidate.name} makes {here}."


def _refused(refused: Mapping[str, str]) -> list[str]:
    """List why candidates have no forecast; those with one reason in common share a line."""
    names: dict[str, list[str]] = {}
    for name, why in refused.items():
        names.setdefault(why, []).append(name)
    return [f"  {listed(found, 3, separator='; ')}: {why}." for why, found in names.items()]


def notes(outlook: Outlook) -> list[str]:
    """Say what the forecasts assume."""
    found = []
    if outlook.unmeasured:
        found.append(
            f"of {', '.join(sorted(outlook.unmeasured))} only the bytes are known: the work on the device was not measured, and "
            "is taken to be that of a dense reducer; memory kept between updates is not counted; and whether this optimizer goes "
            "with it was not tried."
        )
    if outlook.spare_work_s is not None:
        found.append(
            f"{outlook.chosen.candidate.reducer.kind} stays ahead of what was measured if its own work takes less than "
            f"{1e3 * outlook.spare_work_s:,.1f} ms in one exchange."
        )
    return [f"  {note}" for note in found]


def link_notes(measured: Measured, question: Question) -> list[str]:
    """Say what forecasts of other numbers of ranks assume."""
    found = ["the wire is that of one ring through all ranks; trees take less where latency is most of it."]
    if measured.ranks == 1:
        latency = "" if question.latency_s is not None else "; messages are taken to have no latency (latency= sets one)"
        found.append(f"measured on one rank: all of the wire that backward could hide is taken as hidden{latency}.")
    else:
        found.append(
            f"work of reducers is as measured with {measured.ranks} ranks; dgc has more to put together with more ranks."
        )
    return [f"  {note}" for note in found]


def conditions(link: Link, memory: int | None) -> str:
    words = ["1 rank" if link.ranks == 1 else f"{link.ranks:,} ranks"]
    if link.ranks > 1 and not math.isinf(link.bytes_per_s):
        words += [f"{rate(link.bytes_per_s)} each", f"latency {1e6 * link.latency_s:,.0f} us"]
    return ", ".join(words + ([] if memory is None else [f"{binary(memory)} each"]))


def rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    scale, unit = next(((s, u) for s, u in ((1e9, "Gbit/s"), (1e6, "Mbit/s")) if bits >= s), (1e3, "kbit/s"))
    return f"{bits / scale:.3g} {unit}"


# --- by the number of ranks -------------------------------------------------------------------------------------------------


def curves_title(plan: Plan, link: Link) -> str:
    base = candidate_of(plan)
    rows = f", {base.batch} rows" if base.batch else ""
    merged = f" x {base.merge_steps}" if base.merge_steps > 1 else ""
    kind = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(base.precision, base.precision)
    over = f"{rate(link.bytes_per_s)} each, latency {1e6 * link.latency_s:,.0f} us"
    return f"predicted ms of an update, by ranks ({kind}{rows}{merged} on each rank; {over})"


def curves_text(title: str, found: Sequence[Curve]) -> str:
    rows = [
        [
            curve.name,
            *(f"{1e3 * curve.seconds[world]:,.1f}" if world in curve.seconds else "-" for world in SHOWN_WORLDS),
            curve.risk + ("" if curve.is_measured else f" {UNKNOWN}"),
        ]
        for curve in found
    ]
    return "\n".join([title, *aligned([["", *map(str, SHOWN_WORLDS), "risk"], *rows], left=(0, len(SHOWN_WORLDS) + 1))])
