"""Compute random numbers as a pure function of (seed, epoch, sample, position), without state.

A sequential generator gives a sample other numbers when another process reads it, or when reading
starts in mid-epoch. Here every number depends on its coordinates alone; a whole batch takes a few array operations:

    uniforms(seed, epoch, indices[:, None], np.arange(512))     # one number for each of 512 positions of each sample
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 / golden ratio: multiples of it are spread evenly
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random_words(seed: int, epoch: int, index: npt.ArrayLike, position: npt.ArrayLike) -> Words:
    """Return one 64-bit word per (broadcast) index and position, hashing each coordinate by one round of splitmix64."""
    start = _absorb_number(_absorb_number(0, seed), epoch)
    key = _absorb(np.array([start], dtype=np.uint64), np.atleast_1d(np.asarray(index)).astype(np.uint64))
    return _absorb(key, np.atleast_1d(np.asarray(position)).astype(np.uint64))


def uniforms(seed: int, epoch: int, index: npt.ArrayLike, position: npt.ArrayLike) -> Floats:
    """Return numbers in [0, 1), each a multiple of 2**-53."""
    return (random_words(seed, epoch, index, position) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _absorb(state: Words, value: Words) -> Words:
    # Arrays wrap around silently at 2**64, as is meant; NumPy's scalars would warn.
    word = state + (value + np.uint64(1)) * np.uint64(_STRIDE)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_FIRST)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_SECOND)
    return np.asarray(word ^ (word >> np.uint64(31)))


def _absorb_number(state: int, value: int) -> int:
    word = (state + (value + 1) * _STRIDE) & _MASK
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)
