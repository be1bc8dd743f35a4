"""Find exactly the k entries with the largest absolute values; ties go to the lower place.

    by sorting      the reference, a stable sort: any device, any type
    by key          on a GPU: size and place in one integer, of which the largest are taken
    on the CPU      a sample gives a bound that more than k entries should reach, and only those are sorted out
If the sample is unlucky and too few reach the bound, all entries are considered: the bound changes the time, never the result.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SAMPLES = 2**12
"""Entries sampled from one tensor; a tensor of fewer than about four times as many is not sampled."""
STRETCH = 2**17
"""Entries processed at a time: a few arrays of this length fit in a core's cache."""
MARGIN, SPREAD = 1.5, 4.0
"""How many more sampled entries than needed should reach the bound: half as many again, and four standard deviations."""


def largest(row: Tensor, count: int) -> Tensor:
    """Return the places (int64, ascending) of the `count` entries with the largest absolute values; ties: the lower place."""
    if count >= row.numel():
        return torch.arange(row.numel(), device=row.device)
    if row.device.type == "cpu" and row.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(largest_on_cpu(row.detach().numpy(), count))
    if row.dtype == torch.float32:
        return largest_by_key(row, count)
    return largest_by_sorting(row, count)


def largest_by_sorting(row: Tensor, count: int) -> Tensor:
    """Sort all entries: the reference."""
    order = torch.sort(row.abs(), descending=True, stable=True).indices
    return order[:count].sort().values


def largest_by_key(row: Tensor, count: int) -> Tensor:
    """Take the largest of integers made of a float32's size, whose bits sort as it does, and below it the place, reversed."""
    sizes = row.abs().view(torch.int32).long() << 32
    keys = sizes + torch.arange(row.numel() - 1, -1, -1, device=row.device)
    return keys.topk(count, sorted=False).indices.sort().values


def largest_on_cpu(row: np.ndarray, count: int) -> np.ndarray:
    """Choose among the entries that reach a likely bound, or among all where that fails."""
    bound = likely_bound(row, count)
    places = reaching(row, bound) if bound > 0 else None
    if places is None or len(places) < count:
        sizes = np.abs(row)
        return _choose(sizes, np.arange(len(sizes)), count)
    return _choose(np.abs(row[places]), places, count)


def likely_bound(row: np.ndarray, count: int) -> float:
    """Return a size that probably somewhat more than `count` entries reach; 0.0 where a bound would not pay."""
    step = len(row) // SAMPLES | 1  # odd, so as not to sample the same columns of a matrix
    sample = np.abs(row[::step])
    expected = count / step
    wanted = int(MARGIN * expected + SPREAD * expected**0.5 + 1)
    if step < 4 or 2 * wanted > len(sample):
        return 0.0
    return float(np.partition(sample, len(sample) - wanted)[len(sample) - wanted])


def reaching(row: np.ndarray, bound: float) -> np.ndarray:
    """Return the places of all entries of at least this size, ascending."""
    sizes, reaches = np.empty(STRETCH, row.dtype), np.empty(STRETCH, np.bool_)
    places = []
    for start in range(0, len(row), STRETCH):
        part = row[start : start + STRETCH]
        np.abs(part, out=sizes[: len(part)])
        np.greater_equal(sizes[: len(part)], bound, out=reaches[: len(part)])
        places.append(np.flatnonzero(reaches[: len(part)]) + start)
    return np.concatenate(places)


def _choose(sizes: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` candidates, given in ascending places: all above the smallest chosen size, and the first of those at it."""
    if len(sizes) == count:
        return places
    smallest = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    chosen = sizes > smallest
    equal = np.flatnonzero(sizes == smallest)
    chosen[equal[: count - int(chosen.sum())]] = True
    result: np.ndarray = places[chosen]
    return result
