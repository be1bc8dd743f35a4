"""The sections of what a model learns: loss, values, learning rate; bytes on the wire; gradients."""

from __future__ import annotations

from . import curves
from .curves import RATIO_CURVES
from .line_chart import COLOURS, Line
from .markup import Markup
from .show import Show, gap_notes, line_of, over_steps, section, simple_chart
from .strip import ratio_strip
from .words import BYTES, Unit


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
    """Of each run what was sent, and in dashes what dense would have; one grey line where that is the same for all."""
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
    """Only where it moved, or an update was skipped."""
    lines = []
    for track in show.tracks:
        scale = curves.known(track.updates, "loss_scale")
        skipped = [(float(one.step), one.loss_scale) for one in track.updates if one.skipped and one.loss_scale is not None]
        if curves.moved(scale) or skipped:
            lines.append(line_of(track, scale, shape="steps"))
            name = "skipped" if len(show.tracks) == 1 else f"{track.name}, skipped"
            lines += [line_of(track, skipped, name=name, shape="dots")] if skipped else []
    return over_steps(show, "scale", "loss scale", lines, starts_log=True, is_smoothed=False)
