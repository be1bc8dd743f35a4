"""Draw loss, throughput, time of an update and bytes on the wire as one picture for a paper, with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .axis import BYTES, SHORT_TIMES, unit_for
from .curves import (
    Point,
    Track,
    known,
    mean_split,
    means,
    rate_unit,
    sending,
    shared_dense,
    thin,
    throughput,
    tracks_of,
    with_gaps,
)
from .read import Run
from .stacks import parts_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 200
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5508f", "#b98500", "#4fa8dd", "#6b4fbb", "#6b7480")
PART_COLOURS = {"data": "#e69f00", "forward": "#7cc4ee", "backward": "#0072b2", "communication": "#d55e00", "update": "#009e73"}
REST = "#a3acb6"
NAME_LETTERS = 24
MANY, LOSS_MEANS = 200, 100


def require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError('--png needs matplotlib: pip install "fleetx[demo]".') from None


def style(track: Track) -> dict[str, Any]:
    dashes = "-" if track.place < len(COLOURS) else "--"
    return {"color": COLOURS[track.place % len(COLOURS)], "linestyle": dashes}


def short(name: str) -> str:
    """Shorten a name, and escape dollar signs, which matplotlib takes for mathematics."""
    cut = name if len(name) <= NAME_LETTERS else f"{name[: NAME_LETTERS - 1]}…"
    return cut.replace("$", r"\$")


def plot(axes: Axes, track: Track, points: Sequence[Point], scale: float = 1.0, **more: Any) -> None:
    values = [float("nan") if value is None else value / scale for _, value in points]
    axes.plot([place for place, _ in points], values, **(style(track) | {"linewidth": 1.2} | more))


def draw_loss(axes: Axes, tracks: Sequence[Track]) -> None:
    """Draw the loss. Of many points the mean is the line, over a faint line of the extremes."""
    series = [(track, with_gaps(track.updates, "loss")) for track in tracks]
    is_long = any(len(points) > MANY for _, points in series)
    for track, points in series:
        plot(axes, track, thin(points), **({"alpha": 0.3, "linewidth": 0.6} if is_long else {}))
        if is_long:
            plot(axes, track, means(points, LOSS_MEANS))
    losses = [value for _, points in series for _, value in points if value is not None]
    if losses and 0 < min(losses) < 0.1 * max(losses):
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss")


def draw_throughput(axes: Axes, tracks: Sequence[Track]) -> None:
    unit = rate_unit(tracks)
    for track in tracks:
        plot(axes, track, throughput(track.updates, unit))
    axes.set(xlabel="step", ylabel=unit)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])


def draw_split(axes: Axes, tracks: Sequence[Track]) -> None:
    splits = [(track, mean_split(track.updates)) for track in tracks]
    having = [(track, split) for track, split in splits if split]
    if not having:
        axes.set_axis_off()
        return
    unit = unit_for(max(sum(split.values()) for _, split in having), SHORT_TIMES)
    left = [0.0] * len(having)
    rows = list(range(len(having)))
    for part in parts_of([split for _, split in having]):
        widths = [split.get(part, 0.0) / unit.factor for _, split in having]
        axes.barh(rows, widths, left=left, color=PART_COLOURS.get(part, REST), label=part, height=0.62)
        left = [one + width for one, width in zip(left, widths, strict=True)]
    axes.set_yticks(rows, [short(track.name) for track, _ in having])
    axes.set_ylim(len(having) - 0.4, -0.6)
    axes.set(xlabel=f"time of an update ({unit.name})")
    axes.legend(ncols=3, fontsize=6.5, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_bytes(axes: Axes, tracks: Sequence[Track]) -> None:
    having = sending(tracks)
    if not having:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing was sent", ha="center", va="center", transform=axes.transAxes, fontsize=8)
        return
    unit = unit_for(max(max(track.updates[-1].total_dense, track.updates[-1].total_sent) for track in having), BYTES)
    shared = shared_dense(having)
    for track in having if shared is None else [shared]:
        grey = {} if shared is None else {"color": "#444444"}
        plot(axes, track, thin(known(track.updates, "total_dense")), unit.factor, linestyle=":", zorder=3, **grey)
    for track in having:
        plot(axes, track, thin(known(track.updates, "total_sent")), unit.factor)
    axes.plot([], [], color="#444444", linewidth=1.2, label="sent")
    axes.plot([], [], color="#444444", linewidth=1.2, linestyle=":", label="dense all-reduce")
    axes.set(xlabel="step", ylabel=f"{unit.name} on the wire, worker 0")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)


def draw(path: str | os.PathLike[str], runs: Sequence[Run], title: str | None = None) -> None:
    require_matplotlib()
    from matplotlib.figure import Figure

    tracks = tracks_of(runs)
    if not tracks:
        raise ConfigError("--png has nothing to draw: no update has been logged yet.")
    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    places = figure.subplots(2, 2)
    for axes, fill in zip(places.flat, (draw_loss, draw_throughput, draw_split, draw_bytes), strict=True):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        fill(axes, tracks)
        axes.xaxis.label.set_size(8)
        axes.yaxis.label.set_size(8)
    if len(tracks) > 1:
        for track in tracks:
            places.flat[0].plot([], [], label=short(track.name), **style(track))
        places.flat[0].legend(fontsize=7, frameon=False)
    if title:
        figure.suptitle(title.replace("$", r"\$"), fontsize=9)
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise ConfigError(f"the figure cannot be written to {path}: {error}.") from None
