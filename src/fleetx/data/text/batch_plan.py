"""Batches of about equally many tokens: samples of like length together, so that little is padding."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..draws import random_words
from ..source import Indices

Array: TypeAlias = npt.NDArray[Any]

MULTIPLE = 8  # widths are rounded up to it: matrix units work in tiles of eight
_TIE = 2**35  # position of a draw


def padded_width(longest: int, max_seq_len: int) -> int:
    return min(-(-longest // MULTIPLE) * MULTIPLE, max_seq_len)


def plan_batches(lengths: Array, *, tokens: int, max_seq_len: int, seed: int) -> list[Indices]:
    """Samples by falling length, in random order among equals, cut so that count x padded width stays within `tokens`."""
    order = np.lexsort((random_words(seed, 0, np.arange(len(lengths)), _TIE), -np.asarray(lengths)))
    batches, start = [], 0
    while start < len(order):
        count = tokens // padded_width(int(lengths[order[start]]), max_seq_len)
        batches.append(order[start : start + count].astype(np.int64))
        start += count
    return batches
