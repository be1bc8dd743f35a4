"""Make the sections with charts: what a model learns (loss, values, wire, gradients) and what a run costs (time, memory)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import curves
from .axis import BYTES, LONG_TIMES, MEMORY, SHORT_TIMES, Unit, exact, unit_for
from .curves import RATIO_CURVES, Point, Track
from .facts import Facts, times_by_rank, waiting_words, waits_over_steps
from .line_chart import COLOURS, Chart, Horizontal, Line, Shape, line_chart
from .markup import Markup, join, tag
from .read import Run
from .stacks import Bar, area_chart, bar_chart
from .strip import ratio_strip

MOST_BARS, MOST_WAIT_LINES, MOST_CURVES = 24, 8, 4
LEAST_POINTS = 3
NOTICED_WAIT = 0.05
"""Least share of the longest wait at which another rank is shown."""


@dataclass(frozen=True)
class Show:
    """Runs, their facts and tracks, and the horizontal axes: what all sections are made from."""

    runs: Sequence[Run]
    facts: Sequence[Facts]
    tracks: Sequence[Track]
    across: Sequence[Horizontal]
    """Horizontal axes: by step, time and bytes. Empty if no update was logged."""

    @property
    def marks(self) -> list[tuple[str, float]]:
        """Places where a run was resumed; none for several runs, whose marks would look alike."""
        return [("resumed", float(step)) for step in curves.resumed_at(self.runs[0])] if len(self.runs) == 1 else []


def layouts(tracks: Sequence[Track]) -> list[Horizontal]:
    """Return the horizontal axes that the runs have numbers for; the first is shown at the start."""
    having = [track for track in tracks if track.updates]
    if not having:
        return []
    steps = [track.updates[place].step for track in having for place in (0, -1)]
    axes = [Horizontal("step", "step", exact(min(steps), max(steps), whole=True))]
    seconds = [update.total_seconds for track in having for update in track.updates if update.total_seconds is not None]
    sent = [track.updates[-1].total_sent for track in having]
    for key, name, most, units in (
        ("seconds", "time", max(seconds, default=0.0), LONG_TIMES),
        ("bytes", "sent by worker 0", max(sent), BYTES),
    ):
        if most > 0:
            unit = unit_for(most, units)
            axes.append(Horizontal(key, f"{name} ({unit.name})", exact(0.0, most, unit=unit)))
    return axes


def line_of(track: Track, points: Sequence[Point], **more: Any) -> Line:
    return replace(Line(track.place, track.name, points, track.place), **more)


def gap_notes(lines: Sequence[Line], what: str) -> list[str]:
    """Say where a number was missing or not finite."""
    notes = []
    for line in lines:
        gaps = curves.not_finite(line.points)
        if gaps is not None:
            count, first = gaps
            times = "once" if count == 1 else f"{count:,} times"
            whose = f"{line.name}: " if len(lines) > 1 else ""
            notes.append(f"{whose}{what} was missing or not finite {times}, first at step {first:,}.")
    return notes


def over_steps(show: Show, key: str, title: str, lines: Sequence[Line], **more: Any) -> Markup | None:
    """Draw lines over the steps; the reader may switch to time or bytes."""
    if not show.across:
        return None
    chart = Chart(key, title, lines, show.across, marks=show.marks, is_named=len(show.tracks) > 1)
    return line_chart(replace(chart, **more))


def simple_chart(
    show: Show, key: str, title: str, points: Callable[[Track], list[Point]], *, shape: Shape = "line", **more: Any
) -> Markup | None:
    """Draw one line for each track over the steps."""
    return over_steps(show, key, title, [line_of(track, points(track), shape=shape) for track in show.tracks], **more)


def is_wide(chart: Markup) -> bool:
    return chart.startswith('<figure class="chart wide"')


def section(title: str, *children: Markup | None, key: str, is_grid: bool = True) -> Markup | None:
    """Put children under a heading; None if there are none."""
    there = [child for child in children if child]
    if not there:
        return None
    if is_grid and sum(not is_wide(child) for child in there) % 2:  # an odd one would leave a hole in two columns
        first = next(place for place, child in enumerate(there) if not is_wide(child))
        there[first] = tag("div", there[first], class_="wide")
    body = tag("div", *there, class_="grid-of-charts") if is_grid else join(*there)
    return tag("section", tag("h2", title), body, id=key)


# --- what a model learns ----------------------------------------------------------------------------------------------------


def learning(show: Show) -> Markup | None:
    losses = [line_of(track, curves.with_gaps(track.updates, "loss")) for track in show.tracks]
    charts = [over_steps(show, "loss", "loss", losses, notes=gap_notes(losses, "the loss"))]
    for place, name in enumerate(curves.value_names(show.tracks)):
        lines = [line_of(track, curves.user_values(track.updates, name)) for track in show.tracks]
        charts.append(over_steps(show, f"value-{place}", name, lines, notes=gap_notes(lines, name)))
    charts.append(
        simple_chart(
            show, "lr", "learning rate", lambda track: curves.known(track.updates, "lr"), is_smoothed=False, from_zero=True
        )
    )
    return section("Learning", *charts, key="learning")


def wire_lines(show: Show) -> list[Line]:
    """Return lines of bytes sent, and dashed ones of dense updates: one grey line if it is the same for all runs."""
    tracks = curves.sending(show.tracks)
    shared = curves.shared_dense(tracks)
    lines = []
    for track in tracks:
        several = f"{track.name}, " if len(show.tracks) > 1 else ""
        dense = [(float(one.step), one.total_dense) for one in track.updates]
        sent = [(float(one.step), one.total_sent) for one in track.updates]
        if track is shared:
            lines.append(line_of(track, dense, name="dense, all runs", is_dashed=True, colour=COLOURS - 1, is_of_all=True))
        elif shared is None:
            grey = {"colour": COLOURS - 1} if len(show.tracks) == 1 else {}
            lines.append(line_of(track, dense, name=f"{several}dense", is_dashed=True, **grey))
        lines.append(line_of(track, sent, name=f"{several}sent"))
    return sorted(lines, key=lambda line: not line.is_of_all)


def wire(show: Show) -> Markup | None:
    step_and_time = [one for one in show.across if one.key != "bytes"]
    total = over_steps(
        show, "bytes", "bytes on the wire, added up", wire_lines(show), across=step_and_time, units=BYTES, caption="worker 0",
        from_zero=True, is_smoothed=False,
    )  # fmt: skip
    period = simple_chart(
        show, "period", "period of Local SGD", lambda track: curves.known(track.updates, "period"),
        caption="updates between averagings", from_zero=True, is_smoothed=False, shape="steps",
    )  # fmt: skip
    density = simple_chart(
        show, "density", "share of gradients sent", lambda track: curves.known(track.updates, "density"),
        units=(Unit("%", 0.01),), from_zero=True, is_smoothed=False,
    )  # fmt: skip
    return section("On the wire", total, period, density, key="wire")


def gradients(show: Show) -> Markup | None:
    norm = simple_chart(show, "norm", "gradient norm", lambda track: curves.known(track.updates, "grad_norm"))
    noise = simple_chart(
        show, "noise", "gradient noise scale", lambda track: curves.known(track.updates, "noise_scale"), caption="samples"
    )
    ratios = [
        Line(track.place, f"{track.name}, {name}" if len(show.tracks) > 1 else name, curves.ratio_curve(track.updates, of),
             track.place, is_dashed=name != "median")
        for track in show.tracks for name, of in RATIO_CURVES.items()
    ]  # fmt: skip
    summary = over_steps(show, "ratios", "trust ratios of all layers", ratios, starts_log=True, is_smoothed=False)
    strips = [
        ratio_strip(
            f"strip-{track.place}",
            f"{track.name}: trust ratios" if len(show.tracks) > 1 else "trust ratios",
            [(one.step, one.trust_ratios) for one in track.updates if one.trust_ratios],
            track=track.place,
        )
        for track in show.tracks
    ]
    return section("Gradients", norm, loss_scale(show), noise, summary, *strips, key="gradients")


def loss_scale(show: Show) -> Markup | None:
    """Draw the loss scale of tracks where it moved, or an update was skipped."""
    lines = []
    for track in show.tracks:
        scale = curves.known(track.updates, "loss_scale")
        skipped = [(float(one.step), one.loss_scale) for one in track.updates if one.skipped and one.loss_scale is not None]
        if curves.moved(scale) or skipped:
            lines.append(line_of(track, scale, shape="steps"))
            name = "skipped" if len(show.tracks) == 1 else f"{track.name}, skipped"
            lines += [line_of(track, skipped, name=name, shape="dots")] if skipped else []
    return over_steps(show, "scale", "loss scale", lines, starts_log=True, is_smoothed=False)


# --- what a run costs -------------------------------------------------------------------------------------------------------


def speed(show: Show) -> Markup | None:
    unit = curves.rate_unit(show.tracks)
    rates = simple_chart(
        show, "throughput", "throughput", lambda track: curves.throughput(track.updates, unit), caption=unit, from_zero=True
    )
    memory = simple_chart(
        show, "peak", "peak memory so far", lambda track: curves.known(track.updates, "memory_bytes"),
        units=MEMORY, is_smoothed=False,
    )  # fmt: skip
    charts = [split_bars(show), *rank_bars(show), rates, memory, *split_areas(show), *wait_charts(show)]
    return section("Speed", *charts, key="speed")


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
    """Draw for each run which ranks were waited for, over the steps."""
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
        chart = Chart(
            f"waits-{place}", title, lines, show.across[:1], SHORT_TIMES, "of an update", True, is_smoothed=False, notes=note
        )
        charts.append(line_chart(chart))
    return charts


def most_waited_for(waits: Mapping[int, Sequence[tuple[int, float]]]) -> list[int]:
    """Return the ranks that were waited for at least NOTICED_WAIT of the longest wait; at most MOST_WAIT_LINES."""
    total = {rank: sum(seconds for _, seconds in one) for rank, one in waits.items()}
    noticed = [rank for rank, seconds in total.items() if seconds > NOTICED_WAIT * max(total.values())]
    return sorted(sorted(noticed, key=lambda rank: -total[rank])[:MOST_WAIT_LINES])


def memory(show: Show) -> Markup | None:
    """Draw the last memory curve of each run; of a single run its first ones too."""
    drawn = []
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
            drawn.append((curve, Line(track, name, points, colour=track if len(show.runs) > 1 else order, shape="steps")))
    if not drawn:
        return None
    longest = max(line.points[-1][0] for _, line in drawn)
    unit = unit_for(longest, SHORT_TIMES)
    across = [Horizontal("in_step", f"time in the step ({unit.name})", exact(0.0, longest, unit=unit))]
    kinds = {run.memory_kind for run in show.runs if run.memory_curves}
    chart = Chart(
        "memory", "memory over a step", [line for _, line in drawn], across, MEMORY, " / ".join(sorted(kinds)),
        is_smoothed=False, is_named=True, marks=drawn[-1][0].marks if len(show.runs) == 1 else (),
    )  # fmt: skip
    return section("Memory", line_chart(chart), key="memory")
