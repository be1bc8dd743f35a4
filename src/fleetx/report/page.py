"""The page: one HTML file that opens from disk, asks no network, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from .. import __version__
from .costs import memory, speed
from .curves import Track, tracks_of
from .facts import facts_of
from .head import cards, comparison, told
from .learning import gradients, learning, wire
from .line_chart import COLOURS, number_json
from .markup import Markup, data, join, tag
from .read import Run
from .settings import environment, failures, strategy
from .show import Show, layouts
from .strip import picked

SECTIONS = (failures, learning, speed, wire, gradients, memory, strategy, environment)
CLOCK_POINTS = 240
ACROSS_WORDS = {"step": "step", "seconds": "time", "bytes": "bytes sent"}


def make_page(runs: Sequence[Run], title: str | None = None) -> str:
    tracks = tracks_of(runs)
    show = Show(runs, [facts_of(run) for run in runs], tracks, layouts(tracks))
    name = title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}")
    style, script = (files(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    body = join(
        tag("a", "to the charts", href="#charts", class_="skip"),
        tag("header", tag("h1", name), tag("p", headline(show), class_="sub") if headline(show) else None),
        cards(show.facts[0]) if len(runs) == 1 else comparison(show),
        told(show),
        controls(show),
        tag("main", *(section(show) for section in SECTIONS), id="charts"),
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
        tag("title", name),
        Markup(f"<style>{style}</style>"),
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def policy(script: str) -> str:
    """No network at all. The digest names the one script that may run; where it is understood, `unsafe-inline` is void."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'sha256-{digest}'; img-src data:"


def headline(show: Show) -> str:
    """Of one run: when, where and how large."""
    if len(show.runs) > 1 or not show.runs[0].starts:
        return ""
    first, last = show.runs[0].starts[0], show.runs[0].starts[-1]
    ranks, nodes = last.get("ranks"), last.get("nodes")
    many = f"{ranks} rank{'s' if ranks != 1 else ''} on {nodes} node{'s' if nodes != 1 else ''}" if ranks and nodes else None
    when = str(first["time"]).replace("T", " ").replace("+00:00", " UTC") if first.get("time") else None
    again = f"started {len(show.runs[0].starts)} times" if len(show.runs[0].starts) > 1 else None
    return " · ".join(str(piece) for piece in (when, last.get("device"), many, again) if piece)


def clock(track: Track) -> dict[str, Any]:
    """From steps to seconds and bytes, for a chart that is laid out by them."""
    timed = [one for one in track.updates if one.total_seconds is not None]
    kept = [timed[place] for place in picked(len(timed), CLOCK_POINTS)]
    return {
        "step": [one.step for one in kept],
        "seconds": [number_json(one.total_seconds) for one in kept],
        "bytes": [number_json(one.total_sent) for one in kept],
    }


def chip(track: Track) -> Markup:
    key = tag("i", class_=f"key c{track.place % COLOURS}{' dashed' if track.place >= COLOURS else ''}")
    return tag("label", tag("input", type="checkbox", checked=True, data_track=track.place), key, track.name, class_="chip")


def controls(show: Show) -> Markup | None:
    """Shown by the script alone: without it they would do nothing."""
    if not show.across:
        return None
    chips = [chip(track) for track in show.tracks]
    choices = [tag("option", ACROSS_WORDS[one.key], value=one.key) for one in show.across]
    return tag(
        "div",
        tag("div", *chips, class_="chips", role="group", aria_label="runs shown") if len(chips) > 1 else None,
        tag("label", "smooth ", tag("input", type="range", min=0, max=100, value=0, id="smooth")),
        tag("label", "across ", tag("select", *choices, id="across")) if len(choices) > 1 else None,
        tag("label", tag("input", type="checkbox", id="all-log"), " log scales"),
        class_="controls",
    )
