"""The kernels of LAMB: `fleetx.optim.lamb.lamb_update` for a whole model in three launches.

The direction is computed twice from the moments instead of stored: it moves as many bytes, and the gradient is not overwritten.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    CHUNKS,
    DECAYED,
    FIRST,
    FIRST_CHUNK,
    GRAD,
    GROUP_WIDTH,
    MEASURE,
    ROW,
    SCALE_WIDTH,
    SECOND,
    STEP,
    WHOLE,
    exactly,
    item_of,
    number,
    pointer_to,
    read,
    read_weight,
    total,
    write,
    write_weight,
)

LR, BETA1, BETA2, EPS, DECAY, SIGN, REST1, REST2 = map(tl.constexpr, range(8))
"""Settings of a group. REST1 and REST2 are 1 - beta1 and 1 - beta2, computed in float64."""


@triton.jit
def trust_ratio(squared_weight, squared_direction):
    weight, direction = tl.sqrt_rn(squared_weight), tl.sqrt_rn(squared_direction)
    return tl.where((weight > 0) & (direction > 0), weight / direction, 1.0)


@triton.jit
def power(base, exponent):
    """Raise to a power by squaring, in float64: 1 - beta2^t loses four digits in float32."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit
def corrections(row, group):
    """Compute 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t) for the step being made."""
    step = (tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))) + 1.0).to(tl.int32)
    first = 1.0 - power(exactly(group, BETA1), step)
    second = 1.0 - power(exactly(group, BETA2), step)
    return (1.0 / first).to(tl.float32), (1.0 / tl.sqrt(second)).to(tl.float32)


@triton.jit
def direction(weight, mean, square, correction1, correction2, row, group):
    decay = number(group, DECAY) * tl.load(row + DECAYED).to(tl.float32)
    return mean * correction1 / (tl.sqrt(square) * correction2 + number(group, EPS)) + decay * weight


@triton.jit
def advance(row, group, start, left, kind, element: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
            FULL: tl.constexpr):  # fmt: skip
    """Update a chunk's moments, and its weight unless the item is MEASURE; return squared norms of weight and direction."""
    weight = read_weight(row, start, left, element, CHUNK, FULL, "")
    grad = number(group, SIGN) * read(pointer_to(row, GRAD, start, element, ALIGNED), left, CHUNK, FULL, "evict_first")
    mean_place, square_place = pointer_to(row, FIRST, start, tl.float32, True), pointer_to(row, SECOND, start, tl.float32, True)
    mean, square = read(mean_place, left, CHUNK, FULL, ""), read(square_place, left, CHUNK, FULL, "")
    correction1, correction2 = corrections(row, group)
    mean = number(group, BETA1) * mean + number(group, REST1) * grad
    square = number(group, BETA2) * square + number(group, REST2) * grad * grad
    write(mean_place, mean, left, tl.float32, CHUNK, FULL)
    write(square_place, square, left, tl.float32, CHUNK, FULL)
    moved = direction(weight, mean, square, correction1, correction2, row, group)
    squared_weight, squared_direction = tl.sum(weight * weight), tl.sum(moved * moved)
    if kind != MEASURE:
        rate = number(group, LR)
        if kind == WHOLE:
            rate = rate * trust_ratio(squared_weight, squared_direction)
        write_weight(row, weight - rate * moved, start, left, element, CHUNK, FULL)
    return squared_weight, squared_direction


@triton.jit(do_not_specialize=["n_tensors"])
def lamb_advance(items, rows, weight_sums, direction_sums, found, n_tensors, element: tl.constexpr, ALIGNED: tl.constexpr,
                 CHUNK: tl.constexpr):  # fmt: skip
    kind, row, group, tensor, chunk, start, left = item_of(items, rows, n_tensors, CHUNK)  # noqa: RUF059
    if tl.load(found) == 0.0:
        if left == CHUNK:
            squared = advance(row, group, start, left, kind, element, ALIGNED, CHUNK, True)
        else:
            squared = advance(row, group, start, left, kind, element, ALIGNED, CHUNK, False)
        slot = tl.load(row + FIRST_CHUNK) + chunk
        tl.store(weight_sums + slot, squared[0])
        tl.store(direction_sums + slot, squared[1])


@triton.jit(do_not_specialize=["n_tensors"])
def lamb_settle(settled, rows, weight_sums, direction_sums, scales, ratios, found, n_tensors):
    """Compute a tensor's ratio and what APPLY reads, and count its step."""
    word = tl.load(settled + tl.program_id(0))
    tensor, group_number = (word & 0xFFFFFFFF).to(tl.int32), (word >> 32).to(tl.int32)
    row, group = rows + tensor * ROW, rows + n_tensors * ROW + group_number * GROUP_WIDTH
    first_chunk, count = tl.load(row + FIRST_CHUNK), tl.load(row + CHUNKS).to(tl.int32)
    ratio = trust_ratio(total(weight_sums + first_chunk, count), total(direction_sums + first_chunk, count))
    correction1, correction2 = corrections(row, group)
    tl.store(scales + tensor * SCALE_WIDTH, number(group, LR) * ratio)
    tl.store(scales + tensor * SCALE_WIDTH + 1, correction1)
    tl.store(scales + tensor * SCALE_WIDTH + 2, correction2)
    tl.store(ratios + tensor, ratio)
    step = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    tl.store(step, tl.load(step) + tl.where(tl.load(found) == 0.0, 1.0, 0.0))


@triton.jit
def move(row, group, start, left, scale, element: tl.constexpr, CHUNK: tl.constexpr, FULL: tl.constexpr):
    weight = read_weight(row, start, left, element, CHUNK, FULL, "evict_first")
    mean = read(pointer_to(row, FIRST, start, tl.float32, True), left, CHUNK, FULL, "evict_first")
    square = read(pointer_to(row, SECOND, start, tl.float32, True), left, CHUNK, FULL, "evict_first")
    moved = direction(weight, mean, square, tl.load(scale + 1), tl.load(scale + 2), row, group)
    write_weight(row, weight - tl.load(scale) * moved, start, left, element, CHUNK, FULL)


@triton.jit(do_not_specialize=["n_tensors"])
def lamb_apply(items, rows, scales, found, n_tensors, element: tl.constexpr, CHUNK: tl.constexpr):
    kind, row, group, tensor, chunk, start, left = item_of(items, rows, n_tensors, CHUNK)  # noqa: RUF059
    if tl.load(found) == 0.0:
        if left == CHUNK:
            move(row, group, start, left, scales + tensor * SCALE_WIDTH, element, CHUNK, True)
        else:
            move(row, group, start, left, scales + tensor * SCALE_WIDTH, element, CHUNK, False)
