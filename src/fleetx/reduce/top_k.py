"""The k entries that are largest in size: exactly those, of equal ones the first.

    reference       a stable sort: any device, any type
    keys            on a GPU: size and place in one integer, of which the largest are taken
    sampled         on a CPU: a sample gives a bound that more than k entries should reach, and only those are looked at
A sample can be unlucky: then all are looked at. It makes this faster, and changes nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SAMPLES = 2**12
"""Of one tensor; fewer entries than a few of these are looked at whole."""
STRETCH = 2**17
"""Entries: a few arrays of them fit in a core's cache."""
MARGIN, SPREAD = 1.5, 4.0
"""More entries are wanted above the bound than needed: half as many again, and four standard deviations of their number."""


def largest(row: Tensor, count: int) -> Tensor:
    """Places (int64, ascending) of the `count` entries with the largest absolute values; ties go to the lower place."""
    if count >= row.numel():
        return torch.arange(row.numel(), device=row.device)
    if row.device.type == "cpu" and row.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(largest_on_cpu(row.detach().numpy(), count))
    if row.dtype == torch.float32:
        return largest_by_key(row, count)
    return largest_by_sorting(row, count)


def largest_by_sorting(row: Tensor, count: int) -> Tensor:
    order = torch.sort(row.abs(), descending=True, stable=True).indices
    return order[:count].sort().values


def largest_by_key(row: Tensor, count: int) -> Tensor:
    """Sizes of float32 are ordered as their bits are; below them, places, the first being the largest."""
    sizes = row.abs().view(torch.int32).long() << 32
    keys = sizes + torch.arange(row.numel() - 1, -1, -1, device=row.device)
    return keys.topk(count, sorted=False).indices.sort().values


def largest_on_cpu(row: np.ndarray, count: int) -> np.ndarray:
    bound = likely_bound(row, count)
    places = reaching(row, bound) if bound > 0 else None
    if places is None or len(places) < count:
        sizes = np.abs(row)
        return _exactly(sizes, np.arange(len(sizes)), count)
    return _exactly(np.abs(row[places]), places, count)


def likely_bound(row: np.ndarray, count: int) -> float:
    """A size that probably somewhat more than `count` entries reach; 0: no use in one."""
    step = len(row) // SAMPLES | 1  # odd: not in step with rows of a matrix
    sample = np.abs(row[::step])
    expected = count / step
    wanted = int(MARGIN * expected + SPREAD * expected**0.5 + 1)
    if step < 4 or 2 * wanted > len(sample):
        return 0.0
    return float(np.partition(sample, len(sample) - wanted)[len(sample) - wanted])


def reaching(row: np.ndarray, bound: float) -> np.ndarray:
    """Places of all entries of at least this size, ascending."""
    sizes, reaches = np.empty(STRETCH, row.dtype), np.empty(STRETCH, np.bool_)
    found = []
    for start in range(0, len(row), STRETCH):
        part = row[start : start + STRETCH]
        np.abs(part, out=sizes[: len(part)])
        np.greater_equal(sizes[: len(part)], bound, out=reaches[: len(part)])
        found.append(np.flatnonzero(reaches[: len(part)]) + start)
    return np.concatenate(found)


def _exactly(sizes: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """Of candidates in ascending places: all above the smallest size that is still chosen, and the first of those at it."""
    if len(sizes) == count:
        return places
    smallest = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    chosen = sizes > smallest
    equal = np.flatnonzero(sizes == smallest)
    chosen[equal[: count - int(chosen.sum())]] = True
    found: np.ndarray = places[chosen]
    return found
