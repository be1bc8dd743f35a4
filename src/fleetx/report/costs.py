"""The sections of what a run costs: throughput, where the time goes and who waits, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import curves
from .axis import exact
from .line_chart import Chart, Horizontal, Line, line_chart
from .markup import Markup
from .ranks import times_by_rank, waiting_words, waits_over_steps
from .read import Run
from .show import Show, section, simple_chart
from .stacks import Bar, area_chart, bar_chart
from .words import MEMORY, SHORT_TIMES, unit_for

MOST_BARS, MOST_WAIT_LINES, MOST_CURVES = 24, 8, 4
LEAST_POINTS = 3
NOTICED_WAIT = 0.05
"""Of what the worst worker made the others wait."""


def speed(show: Show) -> Markup | None:
    unit = curves.rate_unit(show.tracks)
    rates = simple_chart(
        show, "throughput", "throughput", lambda track: curves.throughput(track.updates, unit), caption=unit, from_zero=True
    )
    memory = simple_chart(
        show,
        "peak",
        "peak memory so far",
        lambda track: curves.known(track.updates, "memory_bytes"),
        units=MEMORY,
        is_smoothed=False,
    )
    return section(
        "Speed", split_bars(show), *rank_bars(show), rates, memory, *split_areas(show), *wait_charts(show), key="speed"
    )


def split_bars(show: Show) -> Markup | None:
    bars = [Bar(track.name, curves.mean_split(track.updates)) for track in show.tracks]
    having = [replace(bar, label=bar.label if len(bars) > 1 else "an update") for bar in bars if bar.parts]
    return bar_chart("split", "where an update's time goes", "mean, worker 0", having)


def split_areas(show: Show) -> list[Markup | None]:
    charts = []
    for track in show.tracks:
        title = f"{track.name}: time of an update" if len(show.tracks) > 1 else "time of an update"
        means = curves.split_means(track.updates)
        charts.append(area_chart(f"split-{track.place}", title, means, show.across[0], track=track.place))
    return charts


def rank_bars(show: Show) -> list[Markup | None]:
    charts: list[Markup | None] = []
    for place, run in enumerate(show.runs):
        times = times_by_rank(run)
        if len(times) < 2:
            continue
        shown = sorted(sorted(times, key=lambda rank: times[rank].communication)[:MOST_BARS])
        bars = []
        for rank in shown:
            one = times[rank]
            rest = max(0.0, one.seconds - one.compute - one.data - one.communication)
            parts = {"data": one.data, "compute": one.compute, "communication": one.communication, "rest": rest}
            bars.append(Bar(f"worker {rank}", parts))
        few = f", the {MOST_BARS} of {len(times)} that waited least" if len(times) > MOST_BARS else ""
        title = f"{whose(show, run)}time of each worker"
        charts.append(bar_chart(f"ranks-{place}", title, f"mean of an update{few}", bars, waiting_words(times)))
    return charts


def whose(show: Show, run: Run) -> str:
    return f"{run.name}: " if len(show.runs) > 1 else ""


def wait_charts(show: Show) -> list[Markup | None]:
    """Who was waited for, as the run went on."""
    charts: list[Markup | None] = []
    for place, run in enumerate(show.runs):
        waits = waits_over_steps(run)
        worst = most_waited_for(waits)
        track = next((one.place for one in show.tracks if one.run is run), 0)
        lines = [Line(track, f"worker {rank}", list(waits[rank]), colour=order) for order, rank in enumerate(worst)]
        if max((len(line.points) for line in lines), default=0) < LEAST_POINTS:
            continue
        others = len(waits) - len(worst)
        which = f"other {others} workers were" if others > 1 else "other worker was"
        note = [f"The {which} waited for less, or not at all."] if others else []
        title = f"{whose(show, run)}waiting for {lines[0].name if len(lines) == 1 else 'a worker'}"
        charts.append(
            line_chart(
                Chart(
                    f"waits-{place}",
                    title,
                    lines,
                    show.across[:1],
                    SHORT_TIMES,
                    "of an update",
                    True,
                    is_smoothed=False,
                    notes=note,
                )
            )
        )
    return charts


def most_waited_for(waits: Mapping[int, Sequence[tuple[int, float]]]) -> list[int]:
    """Ranks that made the others wait at least a little of what the worst did; of many only the worst."""
    total = {rank: sum(seconds for _, seconds in one) for rank, one in waits.items()}
    noticed = [rank for rank, seconds in total.items() if seconds > NOTICED_WAIT * max(total.values())]
    return sorted(sorted(noticed, key=lambda rank: -total[rank])[:MOST_WAIT_LINES])


def memory(show: Show) -> Markup | None:
    """The last curve of each run; of one run alone a few more, from its first on."""
    found = []
    for place, run in enumerate(show.runs):
        kept = (
            run.memory_curves[-1:]
            if len(show.runs) > 1
            else [*run.memory_curves[: MOST_CURVES - 1], *run.memory_curves[MOST_CURVES - 1 :][-1:]]
        )
        track = next((one.place for one in show.tracks if one.run is run), place)
        for order, curve in enumerate(kept):
            step = f"step {curve.step:,}" if curve.step is not None else "a step"
            name = f"{run.name}, {step}" if len(show.runs) > 1 else step
            points = list(zip(curve.seconds, curve.bytes, strict=True))
            found.append((curve, Line(track, name, points, colour=track if len(show.runs) > 1 else order, shape="steps")))
    if not found:
        return None
    longest = max(line.points[-1][0] for _, line in found)
    unit = unit_for(longest, SHORT_TIMES)
    across = [Horizontal("in_step", f"time in the step ({unit.name})", exact(0.0, longest, unit=unit))]
    kinds = {run.memory_kind for run in show.runs if run.memory_curves}
    chart = Chart(
        "memory", "memory over a step", [line for _, line in found], across, MEMORY, " / ".join(sorted(kinds)),
        is_smoothed=False, is_named=True, marks=found[-1][0].marks if len(show.runs) == 1 else (),
    )  # fmt: skip
    return section("Memory", line_chart(chart), key="memory")
