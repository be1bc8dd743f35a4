"""Measure the network between the ranks: how long a collective takes by its bytes, on the very group that trains.

Between measured sizes times are interpolated; for other bandwidths or numbers of ranks a line is fitted,

    seconds = latency + bytes / rate
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, final

import torch

from ..dist.comm import Comm
from ..dist.predicted_cost import Link
from .clock import wait_for

KIB = 2**10
SIZES = tuple(4 * KIB * 4**power for power in range(8))
"""Bytes of one rank's tensor: 4 KiB to 64 MiB."""
REPEATS = 5
LONGEST_S = 4.0
"""Most seconds for all sizes of one collective, about: on a slow link the largest are left out."""


@final
@dataclass(frozen=True, slots=True)
class Line:
    """seconds = latency_s + bytes / bytes_per_s"""

    latency_s: float
    bytes_per_s: float

    def seconds(self, count: float) -> float:
        return self.latency_s + count / self.bytes_per_s


Point = tuple[float, float]
"""Bytes and seconds."""


def fitted(points: Sequence[Point]) -> Line:
    """Fit the line with the least sum of squared relative errors: a small message counts as much as a large one."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_bytes = sum(w * count for w, (count, _) in zip(weights, points, strict=True)) / total
    mean_seconds = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (count - mean_bytes) ** 2 for w, (count, _) in zip(weights, points, strict=True))
    together = sum(w * (c - mean_bytes) * (s - mean_seconds) for w, (c, s) in zip(weights, points, strict=True))
    slope = together / spread if spread else 0.0
    if slope <= 0:  # noise is larger than what the bytes cost: by the largest message they cost no more than this
        count, seconds = max(points)
        return Line(0.0, count / seconds)
    latency = mean_seconds - slope * mean_bytes
    if latency >= 0:
        return Line(latency, 1 / slope)
    through_zero = sum(w * c * s for w, (c, s) in zip(weights, points, strict=True))
    return Line(0.0, sum(w * c * c for w, (c, _) in zip(weights, points, strict=True)) / through_zero)


def read_off(points: Sequence[Point], count: float) -> float:
    """Interpolate the seconds of so many bytes between the two sizes around them; beyond the largest use the fitted rate."""
    if count >= points[-1][0]:
        line, (largest, seconds) = fitted(points), points[-1]
        return seconds + (count - largest) / line.bytes_per_s
    place = bisect.bisect_right([size for size, _ in points], count)
    if place == 0:
        return points[0][1]  # less than the smallest takes as long: it is latency
    (low, low_s), (high, high_s) = points[place - 1], points[place]
    return low_s + (high_s - low_s) * (count - low) / (high - low)


@final
@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Hold the times of one group of ranks."""

    ranks: int
    all_reduce: tuple[Point, ...]
    all_gather: tuple[Point, ...]

    def all_reduce_s(self, count: float) -> float:
        return read_off(self.all_reduce, count) if self.ranks > 1 else 0.0

    def link(self) -> Link:
        """Return what cost functions want: the link between two ranks of a ring, which sends 2 (N-1)/N of the bytes."""
        if self.ranks == 1:
            return Link(1, float("inf"))
        line, steps = fitted(self.all_reduce), 2 * (self.ranks - 1)
        return Link(self.ranks, line.bytes_per_s * steps / self.ranks, line.latency_s / steps)


def measured_link(comm: Comm, device: torch.device, *, sizes: Sequence[int] = SIZES, longest_s: float = LONGEST_S) -> LinkProfile:
    """Measure the link. Collective: every rank has the same figures, those of the slowest."""
    if comm.size == 1:
        return LinkProfile(1, (), ())
    return LinkProfile(
        comm.size,
        timed(comm, device, sizes, longest_s, lambda tensor: comm.all_reduce(tensor).wait()),
        timed(comm, device, sizes, longest_s, lambda tensor: comm.all_gather(tensor)[1].wait()),
    )


def timed(
    comm: Comm, device: torch.device, sizes: Sequence[int], longest_s: float, run: Callable[[torch.Tensor], Any]
) -> tuple[Point, ...]:
    """Return the slowest rank's median for each size. Whether a larger size is still tried follows from numbers all ranks share,
    or some would wait in a collective that others never enter."""
    points: list[Point] = []
    spent = 0.0
    for size in sizes:
        tensor = torch.zeros(size // 4, device=device)
        seconds = [_seconds(comm, device, run, tensor) for _ in range(1 + REPEATS)][1:]
        slowest = max(comm.gather_json([median(seconds), sum(seconds)]))
        points.append((float(size), float(slowest[0])))
        spent += float(slowest[1])
        following = spent + REPEATS * 4 * float(slowest[0])
        if following > longest_s and len(points) >= 3:
            break
    return tuple(points)


def _seconds(comm: Comm, device: torch.device, run: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> float:
    comm.barrier()
    begun = time.perf_counter()
    run(tensor)
    wait_for(device)
    return time.perf_counter() - begun
