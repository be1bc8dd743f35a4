"""Blockwise integers as they are defined, in NumPy: what fleetx.dist.codec is compared with. Shares no line with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def to_bfloat16(values: Array) -> Array:
    """Round finite values to the nearest bfloat16, ties to even, by way of float32; the results are float64."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def blockwise(row: Array, *, bits: int, block: int) -> tuple[Array, Array]:
    """Return what is received in the place of a row of finite numbers, and what is kept: their sum is the row."""
    received = np.zeros_like(row)
    for begin in range(0, len(row), block):
        values = row[begin : begin + block]
        largest = 2 ** (bits - 1) - 1
        scale = to_bfloat16(np.array([np.abs(values).max() / largest], dtype=row.dtype))[0].astype(row.dtype)
        if scale >= 2.0**-126:
            received[begin : begin + block] = np.rint(values / scale) * scale
    return received, row - received
