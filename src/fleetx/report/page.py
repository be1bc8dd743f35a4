"""Make the page: one HTML file that opens from disk, asks no network, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from .. import __version__
from . import curves
from .axis import duration, memory_size, plain, size
from .curves import Track, tracks_of
from .facts import Facts, facts_of, flops_words, steps_words, wire_words
from .line_chart import COLOURS, number_json
from .markup import Markup, data, join, side_by_side, tag
from .read import Run, log_tails
from .sections import Show, gradients, layouts, learning, memory, section, speed, wire
from .strip import picked

STATES = {"finished": "good", "running": "good", "failed": "bad", "no end written": "odd", "stopped": "odd"}
REPEATED = "the first try counts in time and bytes, the second is what the charts show"
CLOCK_POINTS = 240
SMOOTHING = 40
"""Where the slider stands at first, of 100: lines of many points are drawn as their mean over some 1 % of the steps, and the
points themselves are faint."""
ACROSS_WORDS = {"step": "step", "seconds": "time", "bytes": "bytes sent"}


def make_page(runs: Sequence[Run], title: str | None = None, *, refresh_seconds: int | None = None) -> str:
    """Return the page of one run, or of several. `refresh_seconds`: time after which a browser loads it again; None: never."""
    tracks = tracks_of(runs)
    show = Show(runs, [facts_of(run) for run in runs], tracks, layouts(tracks))
    name = title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}")
    style, script = (files(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    sections = [make(show) for make in (failures, learning, speed, wire, gradients, memory, strategy, environment)]
    body = join(
        tag("a", "to the charts", href="#charts", class_="skip"),
        tag("header", tag("h1", name), tag("p", headline(show), class_="sub") if headline(show) else None),
        cards(show.facts[0]) if len(runs) == 1 else comparison(show),
        warnings(show),
        controls(show),
        tag("main", *sections, id="charts"),
        tag("footer", f"fleetx report {__version__}"),
        tag("div", class_="tip", role="presentation", hidden=True),
        tag("div", class_="spoken", aria_live="polite"),
        tag("div", data({"clocks": [clock(track) for track in tracks]}), id="page-data", hidden=True),
        Markup(f"<script>{script}</script>"),
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="refresh", content=refresh_seconds) if refresh_seconds else None,
        tag("title", name),
        Markup(f"<style>{style}</style>"),
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def policy(script: str) -> str:
    """Return the content security policy: no network, and no script but the one of this digest, which voids `unsafe-inline`."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'sha256-{digest}'; img-src data:"


def headline(show: Show) -> str:
    """Say of a single run when and where it ran, and on how many ranks."""
    if len(show.runs) > 1 or not show.runs[0].starts:
        return ""
    first, last = show.runs[0].starts[0], show.runs[0].starts[-1]
    ranks, nodes = last.get("ranks"), last.get("nodes")
    many = f"{ranks} rank{'s' if ranks != 1 else ''} on {nodes} node{'s' if nodes != 1 else ''}" if ranks and nodes else None
    when = str(first["time"]).replace("T", " ").replace("+00:00", " UTC") if first.get("time") else None
    again = f"started {len(show.runs[0].starts)} times" if len(show.runs[0].starts) > 1 else None
    return " · ".join(str(piece) for piece in (when, last.get("device"), many, again) if piece)


def clock(track: Track) -> dict[str, Any]:
    """Return the seconds and bytes of some steps: page.js interpolates between them."""
    timed = [update for update in track.updates if update.total_seconds is not None]
    kept = [timed[place] for place in picked(len(timed), CLOCK_POINTS)]
    return {
        "step": [update.step for update in kept],
        "seconds": [number_json(update.total_seconds) for update in kept],
        "bytes": [number_json(update.total_sent) for update in kept],
    }


def chip(track: Track) -> Markup:
    key = tag("i", class_=f"key c{track.place % COLOURS}{' dashed' if track.place >= COLOURS else ''}")
    return tag("label", tag("input", type="checkbox", checked=True, data_track=track.place), key, track.name, class_="chip")


def controls(show: Show) -> Markup | None:
    """Make the controls, which are hidden without scripts."""
    if not show.across:
        return None
    chips = [chip(track) for track in show.tracks]
    choices = [tag("option", ACROSS_WORDS[one.key], value=one.key) for one in show.across]
    return tag(
        "div",
        tag("div", *chips, class_="chips", role="group", aria_label="runs shown") if len(chips) > 1 else None,
        tag("label", "smooth ", tag("input", type="range", min=0, max=100, value=SMOOTHING, id="smooth")),
        tag("label", "across ", tag("select", *choices, id="across")) if len(choices) > 1 else None,
        tag("label", tag("input", type="checkbox", id="all-log"), " log scales"),
        class_="controls",
    )


def fact_cells(facts: Facts) -> dict[str, tuple[str, str]]:
    """Return large and small text of each fact, by name."""
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
    shown = [name for name in cells if name in facts.best]
    cells |= {f"best {name}": (plain(facts.best[name][0]), f"at step {facts.best[name][1]:,}") for name in shown}
    if facts.rate is not None:
        cells["throughput"] = (plain(facts.rate), facts.rate_unit)
    if (computing := flops_words(facts)) is not None:
        cells["model"] = computing
    if facts.memory_bytes is not None:
        cells["peak memory"] = (memory_size(facts.memory_bytes), "worker 0")
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


def speed_up(first: Facts, facts: Facts) -> dict[str, tuple[str, str]]:
    """Compare a run's throughput with that of the first run; nothing where the units differ or one is not known."""
    if not first.rate or not facts.rate or first.rate_unit != facts.rate_unit:
        return {}
    return {"speed-up": (f"{facts.rate / first.rate:.2f} x", "the first run's" if facts is not first else "")}


def comparison(show: Show) -> Markup:
    """Make the table of several runs: one row each, in place of cards."""
    cells = [fact_cells(facts) | speed_up(show.facts[0], facts) for facts in show.facts]
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


def warnings(show: Show) -> Markup | None:
    """List what the reader should know before the charts: damage, restarts, a missing end."""
    texts = []
    for run, facts in zip(show.runs, show.facts, strict=True):
        whose = f"{run.name}: " if len(show.runs) > 1 else ""
        texts += [f"{whose}{problem}." for problem in run.problems]
        if not run.updates:
            texts.append(f"{whose}no update has been logged yet.")
        if run.again:
            texts.append(f"{whose}{run.again:,} updates were done again after a restart: {REPEATED}.")
        if facts.state == "no end written":
            texts.append(
                f"{whose}no summary was written: the run was killed, or has not gone on for a while ({steps_words(facts)})."
            )
        gap = max((curves.step_gap(updates) for updates in run.updates.values()), default=1)
        if gap > 1:
            texts.append(f"{whose}one update in {gap:,} was logged: sums over updates are of those.")
    return tag("ul", *(tag("li", text) for text in texts), class_="warnings") if texts else None


def strategy(show: Show) -> Markup | None:
    heads, columns = [], []
    for run in show.runs:
        for pair, settings in run.strategies.items():
            model = curves.model_name(run, pair)
            heads.append(run.name if len(run.strategies) == 1 else f"{run.name} · {model}")
            columns.append(settings)
    return section("Strategy", side_by_side(heads, columns, "settings") if columns else None, key="strategy", is_grid=False)


def environment_row(run: Run) -> dict[str, Any]:
    """Return what ran, where and how, of the last start."""
    last: Mapping[str, Any] = run.starts[-1] if run.starts else {}
    row = {
        name: last.get(name)
        for name in ("fleetx", "commit", "torch", "python", "platform", "device", "backend", "ranks", "nodes")
    }
    for name in ("hosts", "command"):
        given = last.get(name)
        row[name] = " ".join(map(str, given)) if isinstance(given, list) else given
    given = last.get("pairs")
    pairs = [pair for pair in given if isinstance(pair, dict)] if isinstance(given, list) else []
    for place, pair in enumerate(pairs, start=1):
        end = f" {place}" if len(pairs) > 1 else ""
        row |= {f"{name}{end}": pair.get(name) for name in ("model", "parameters", "optimizer")}
    row["total_steps"] = last.get("total_steps")
    row["started"] = ", ".join(str(start.get("time")) for start in run.starts if start.get("time"))
    row["folder"] = str(run.folder)
    return {name: value for name, value in row.items() if value not in (None, "")}


def environment(show: Show) -> Markup | None:
    columns = [environment_row(run) for run in show.runs]
    table = side_by_side([run.name for run in show.runs], columns, "facts")
    return section("Environment", table, key="environment", is_grid=False)


def failures(show: Show) -> Markup | None:
    """Show the last lines of worker logs, of runs that failed or ended without a summary."""
    parts = []
    for run, facts in zip(show.runs, show.facts, strict=True):
        if facts.state not in ("failed", "no end written"):
            continue
        parts += [tag("p", f"{run.name}: {facts.error}", class_="finding")] if facts.error else []
        for rank, text in log_tails(run.folder).items():
            head = tag("summary", f"{run.name}, worker {rank}" if len(show.runs) > 1 else f"worker {rank}")
            parts.append(tag("details", head, tag("pre", text, tabindex=0), open=facts.state == "failed" and len(show.runs) == 1))
    return section("Last lines of the worker logs", *parts, key="failures", is_grid=False)
