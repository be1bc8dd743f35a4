"""The head of the page: cards of one run, a table of several, and what a reader should know first."""

from __future__ import annotations

from . import curves
from .facts import Facts, steps_words, wire_words
from .line_chart import COLOURS
from .markup import Markup, tag
from .show import Show
from .words import duration, memory, plain, size

STATES = {"finished": "good", "running": "good", "failed": "bad", "no end written": "odd", "stopped": "odd"}
REPEATED = "the first try counts in time and bytes, the second is what the charts show"


def fact_cells(facts: Facts) -> dict[str, tuple[str, str]]:
    """By name: a large text, and a small one under it."""
    cells = {"state": (facts.state, facts.error or "")}
    beyond = f"of {facts.total_steps:,}" if facts.total_steps not in (None, facts.steps) else ""
    skipped = f"{facts.skipped:,} skipped" if facts.skipped else ""
    if facts.steps is not None:
        cells["steps"] = (f"{facts.steps:,}", ", ".join(piece for piece in (beyond, skipped) if piece))
    if facts.seconds is not None:
        cells["time"] = (duration(facts.seconds), "")
    if facts.loss is not None:
        cells["loss"] = (plain(facts.loss), "last" if facts.is_loss_finite else "the last that was finite")
    cells |= {name: (plain(value), "last") for name, value in list(facts.values.items())[:4] if name not in cells}
    if facts.rate is not None:
        cells["throughput"] = (plain(facts.rate), facts.rate_unit)
    if facts.memory_bytes is not None:
        cells["peak memory"] = (memory(facts.memory_bytes), "worker 0")
    if facts.sent is not None and facts.dense is not None:
        cells["sent by worker 0"] = (size(facts.sent), wire_words(facts.sent, facts.dense))
    return cells


def cards(facts: Facts) -> Markup:
    made = [
        tag(
            "div",
            tag("dt", name),
            tag("dd", tag("strong", large), tag("small", small) if small else None),
            class_=f"card {STATES.get(large, '')}".strip() if name == "state" else "card",
        )
        for name, (large, small) in fact_cells(facts).items()
    ]
    return tag("dl", *made, class_="cards")


def comparison(show: Show) -> Markup:
    """One row for each run in place of cards."""
    cells = [fact_cells(facts) for facts in show.facts]
    names = list(dict.fromkeys(name for one in cells for name in one))
    head = tag("thead", tag("tr", tag("th", "run", scope="col"), *(tag("th", name, scope="col") for name in names)))
    rows = []
    for run, one in zip(show.runs, cells, strict=True):
        colours = [track.place for track in show.tracks if track.run is run]
        keys = [tag("i", class_=f"key c{place % COLOURS}") for place in colours]
        entries = [
            tag("td", tag("span", one[name][0], class_=f"state {STATES.get(one[name][0], '')}" if name == "state" else None),
                tag("small", one[name][1]) if one[name][1] else None) if name in one else tag("td", "–")
            for name in names
        ]  # fmt: skip
        rows.append(tag("tr", tag("th", *keys, run.name, scope="row"), *entries))
    return tag("div", tag("table", head, tag("tbody", *rows), class_="runs"), class_="scroll", tabindex=0)


def told(show: Show) -> Markup | None:
    """What the reader should know before the charts."""
    found = []
    for run, facts in zip(show.runs, show.facts, strict=True):
        whose = f"{run.name}: " if len(show.runs) > 1 else ""
        found += [f"{whose}{problem}." for problem in run.problems]
        if not run.updates:
            found.append(f"{whose}no update has been logged yet.")
        if run.again:
            found.append(f"{whose}{run.again:,} updates were done again after a restart: {REPEATED}.")
        if facts.state == "no end written":
            found.append(
                f"{whose}no summary was written: the run was killed, or has not gone on for a while ({steps_words(facts)})."
            )
        gap = max((curves.step_gap(updates) for updates in run.updates.values()), default=1)
        if gap > 1:
            found.append(f"{whose}one update in {gap:,} was logged: sums over updates are of those.")
    return tag("ul", *(tag("li", one) for one in found), class_="told") if found else None
