"""The codec's kernels for CUDA, in Triton: one pass over the values each way, with the bits of the list operations in codec.py.

A program takes some blocks, as two tiles: the first and the second half of each, which 4 bits pack into the same bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(1.1754943508222875e-38)
UPPER, NAN = tl.constexpr(-65536), tl.constexpr(0x7FC0)
"""The bits of a float32 that a bfloat16 has; a NaN as bfloat16."""
ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: float32 has no fractions there, so that adding and subtracting it rounds to the nearest integer, ties to even."""


@triton.jit
def encode(values, scales, numbers, kept, numel, count, LARGEST: tl.constexpr, HALF: tl.constexpr, BLOCKS: tl.constexpr,
           KEEPS: tl.constexpr):  # fmt: skip
    """Write the scales and integers of `count` blocks, and what they miss."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < count
    place = block.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    first_in, second_in = place < numel, place + HALF < numel
    first = tl.load(values + place, mask=first_in, other=0.0)
    second = tl.load(values + place + HALF, mask=second_in, other=0.0)
    first_size, second_size = tl.abs(first), tl.abs(second)
    # A maximum may drop a NaN: what is not finite is counted, and left out of it.
    first_bad, second_bad = ~(first_size < float("inf")), ~(second_size < float("inf"))
    bad = (tl.sum(first_bad.to(tl.int32), 1) + tl.sum(second_bad.to(tl.int32), 1)) > 0
    largest = tl.maximum(tl.max(tl.where(first_bad, 0.0, first_size), 1), tl.max(tl.where(second_bad, 0.0, second_size), 1))
    # To bfloat16, the upper half of a float32: to the nearest, ties to even. Done in integers, so that all devices do the same.
    word = tl.div_rn(largest, tl.full([BLOCKS], LARGEST, tl.float32)).to(tl.int32, bitcast=True)
    word = (word + 0x7FFF + ((word >> 16) & 1)) & UPPER
    scale = word.to(tl.float32, bitcast=True)
    scale = tl.where(scale < SMALLEST_SCALE, 0.0, scale)
    bad = bad | ~(scale < float("inf"))
    half = tl.where(bad, NAN, scale.to(tl.int32, bitcast=True) >> 16)
    tl.store(scales + block, half.to(tl.int16), mask=is_block)
    factor = tl.where(bad, 0.0, scale)
    divisor = tl.where(factor == 0.0, 1.0, factor)[:, None]
    low = (tl.div_rn(first, divisor + tl.zeros_like(first)) + ROUNDER) - ROUNDER
    high = (tl.div_rn(second, divisor + tl.zeros_like(second)) + ROUNDER) - ROUNDER
    column = tl.arange(0, HALF)[None, :]
    if LARGEST == 127:
        at = numbers + block.to(tl.int64)[:, None] * (2 * HALF) + column
        inside = is_block[:, None] & (column >= 0)
        tl.store(at, low.to(tl.int32).to(tl.int8), mask=inside)
        tl.store(at + HALF, high.to(tl.int32).to(tl.int8), mask=inside)
    else:
        at = numbers + block.to(tl.int64)[:, None] * HALF + column
        packed = (low.to(tl.int32) + 8) | ((high.to(tl.int32) + 8) << 4)
        tl.store(at, packed.to(tl.int8), mask=is_block[:, None] & (column >= 0))
    if KEEPS:
        tl.store(kept + place, first - low * factor[:, None], mask=first_in)
        tl.store(kept + place + HALF, second - high * factor[:, None], mask=second_in)


@triton.jit
def decode(scales, numbers, out, numel, count, LARGEST: tl.constexpr, HALF: tl.constexpr, BLOCKS: tl.constexpr,
           ADDS: tl.constexpr):  # fmt: skip
    """Write the values of `count` blocks, or add them to what is there."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < count
    half = tl.load(scales + block, mask=is_block, other=0).to(tl.int32)
    scale = (half << 16).to(tl.float32, bitcast=True)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = is_block[:, None] & (column >= 0)
    if LARGEST == 127:
        at = numbers + block.to(tl.int64)[:, None] * (2 * HALF) + column
        low = tl.load(at, mask=inside, other=0).to(tl.float32)
        high = tl.load(at + HALF, mask=inside, other=0).to(tl.float32)
    else:
        packed = tl.load(numbers + block.to(tl.int64)[:, None] * HALF + column, mask=inside, other=0).to(tl.int32)
        low = ((packed & 15) - 8).to(tl.float32)
        high = (((packed >> 4) & 15) - 8).to(tl.float32)
    place = block.to(tl.int64)[:, None] * (2 * HALF) + column
    first_in, second_in = place < numel, place + HALF < numel
    first, second = low * scale, high * scale
    if ADDS:
        first += tl.load(out + place, mask=first_in, other=0.0)
        second += tl.load(out + place + HALF, mask=second_in, other=0.0)
    tl.store(out + place, first, mask=first_in)
    tl.store(out + place + HALF, second, mask=second_in)
