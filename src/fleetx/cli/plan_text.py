"""Forecasts of other links, ranks and memory, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..auto.measurements import Forecast, Measured
from ..auto.plan import Plan
from ..auto.what_if import Curve, Outlook, Question, candidate_of, same_plan
from ..dist.wire_cost import Link
from ..strategy import DistributedStrategy

SHOWN = 12
"""Forecasts of a table; the rest are counted."""
TOLD_WORLDS = (2, 8, 64, 512, 4096)
UNKNOWN = "(work not measured)"


def how_to_use(plan: Plan) -> str:
    """What to write into a script."""
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
    table = aligned(["", "plan", "ms, foretold", "samples/s", "MB, foretold", "MB sent", "risk"], rows, left=(1, 6))
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
        f"{one.peak_bytes / 1e6:,.1f}" if one.peak_bytes else "-",
        f"{one.cost.bytes_sent / 1e6:,.2f}",
        one.candidate.risk.value + ("" if outlook.is_measured(one) else f" {UNKNOWN}"),
    ]


def what_changed(plan: Plan, outlook: Outlook) -> str:
    """One sentence: the plan as measured beside the choice."""
    chosen, before = outlook.chosen, candidate_of(plan)
    there = f"as measured ({conditions(plan.measured.link.link(), None)}) {plan.chosen} was taken"
    same = same_plan(outlook, before)
    here = f"{chosen.samples / chosen.cost.seconds:,.1f} samples/s"
    if same is chosen:
        return f"the same: {there}; here it makes {here}, an update of {chosen.samples:,} in {1e3 * chosen.cost.seconds:,.1f} ms."
    told = f"it {same}" if isinstance(same, str) else f"it would make {same.samples / same.cost.seconds:,.1f} samples/s"
    return f"changed: {there}; here {told}, and {chosen.candidate.name} makes {here}."


def _refused(refused: Mapping[str, str]) -> list[str]:
    """Candidates that have one reason in common share a line."""
    names: dict[str, list[str]] = {}
    for name, why in refused.items():
        names.setdefault(why, []).append(name)
    return [f"  {_few(found)}: {why}." for why, found in names.items()]


def _few(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def notes(outlook: Outlook) -> list[str]:
    """What the forecasts take for granted."""
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
    """What forecasts of other numbers of ranks take for granted."""
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
    return ", ".join(words + ([] if memory is None else [f"{memory / 1e6:,.0f} MB each"]))


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
    return f"ms of an update, foretold, by ranks ({kind}{rows}{merged} on each rank; {over})"


def curves_text(title: str, found: Sequence[Curve]) -> str:
    rows = [
        [
            curve.name,
            *(f"{1e3 * curve.seconds[world]:,.1f}" if world in curve.seconds else "-" for world in TOLD_WORLDS),
            curve.risk + ("" if curve.is_measured else f" {UNKNOWN}"),
        ]
        for curve in found
    ]
    return "\n".join([title, *aligned(["", *map(str, TOLD_WORLDS), "risk"], rows, left=(0, len(TOLD_WORLDS) + 1))])


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    table = [head, *rows]
    widths = [max(len(line[place]) for line in table) for place in range(len(head))]
    padded = [[cell.ljust(widths[i]) if i in left else cell.rjust(widths[i]) for i, cell in enumerate(line)] for line in table]
    return ["  ".join(line).rstrip() for line in padded]
