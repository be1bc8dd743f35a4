"""Draw a strip of colours: layers downward, steps across, the trust ratio of each layer as a shade."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence

from .axis import plain
from .line_chart import drawing, frame, plot
from .markup import Markup, data, tag

CELLS, MOST_COLUMNS = 12_000, 160
ROW_PIXELS, MOST_PIXELS, LEAST_LABEL_PIXELS = 15, 480, 13
SHADES = ((24, 34, 88), (38, 92, 138), (60, 150, 146), (190, 192, 96), (255, 236, 150))
"""Colours from low to high, ever lighter: the order can be seen without colours too."""
SHADE_COUNT = 64
EMPTY = SHADE_COUNT
"""Index of the transparent shade, for a layer that a step did not log."""


def shade(share: float) -> tuple[int, int, int]:
    """Interpolate SHADES at a share of 0 to 1."""
    at = share * (len(SHADES) - 1)
    low = min(int(at), len(SHADES) - 2)
    red, green, blue = (round(a + (b - a) * (at - low)) for a, b in zip(SHADES[low], SHADES[low + 1], strict=True))
    return red, green, blue


def png(rows: Sequence[bytes]) -> bytes:
    """Write a PNG of rows that hold one byte per cell, an index into the palette of shades."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    palette = b"".join(bytes(shade(place / (SHADE_COUNT - 1))) for place in range(SHADE_COUNT)) + bytes(3)
    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    see_through = b"\xff" * SHADE_COUNT + b"\0"
    chunks = ((b"IHDR", head), (b"PLTE", palette), (b"tRNS", see_through), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in chunks)


def picked(count: int, most: int) -> list[int]:
    """Pick at most `most` places spread evenly, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def shade_rows(table: Sequence[Sequence[float | None]]) -> tuple[list[bytes], float, float]:
    """Return shade indices on a log scale, and the least and greatest value above zero. Zero has the lowest shade."""
    above = [value for row in table for value in row if value is not None and value > 0]
    low, high = (min(above), max(above)) if above else (1.0, 1.0)
    span = math.log(high / low) or 1.0

    def index(value: float | None) -> int:
        if value is None:
            return EMPTY
        return round((SHADE_COUNT - 1) * math.log(value / low) / span) if value > low else 0

    return [bytes(index(value) for value in row) for row in table], low, high


def ratio_strip(key: str, title: str, logged: Sequence[tuple[int, Mapping[str, float]]], *, track: int) -> Markup | None:
    """Draw trust ratios by layer; None if fewer than two steps logged any."""
    names = list(dict.fromkeys(name for _, ratios in logged for name in ratios))
    if not names or len(logged) < 2:
        return None
    shown = [logged[place] for place in picked(len(logged), max(20, min(MOST_COLUMNS, CELLS // len(names))))]
    table = [[ratios.get(name) for _, ratios in shown] for name in names]
    rows, low, high = shade_rows(table)
    address = "data:image/png;base64," + base64.b64encode(png(rows)).decode()
    pixels = min(ROW_PIXELS * len(names), MOST_PIXELS)
    every = math.ceil(LEAST_LABEL_PIXELS * len(names) / pixels)
    labels = [
        tag("span", tag("bdi", name), title=name, style=f"top:{100 * (place + 0.5) / len(names):.2f}%")
        for place, name in enumerate(names)
        if place % every == 0
    ]
    steps = [step for step, _ in shown]
    first, last = (f"{step:,}" for step in (steps[0], steps[-1]))
    ends = [tag("span", first, style="left:0", class_="lo"), tag("span", last, style="left:100%", class_="hi")]
    stops = ",".join(f"rgb{shade(place / 8)}" for place in range(9))
    least, most = plain(low, 2), plain(high, 2)
    scale = tag("span", least, tag("i", style=f"background:linear-gradient(90deg,{stops})"), most, class_="ramp")
    spoken = f"{title}: {len(names)} layers over steps {steps[0]} to {steps[-1]}, from {least} to {most}."
    image = tag("image", href=address, width=100, height=100, preserveAspectRatio="none")
    drawn = plot(drawing(image, width=100, height=100), spoken, class_="plot strip", style=f"height:{pixels}px")
    island = {"id": key, "strip": True, "names": names, "steps": steps, "t": track,
              "cells": [[None if value is None else float(f"{value:.3g}") for value in row] for row in table]}  # fmt: skip
    across = tag("div", *ends, tag("em", "step"), class_="xt")
    body = tag("div", tag("div", *labels, class_="yt names"), drawn, across, class_="body wide-labels")
    return frame(key, title, "by layer, log shades", None, scale, body, data(island), class_="wide")
