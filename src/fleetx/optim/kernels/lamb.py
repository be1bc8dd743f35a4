"""The kernel of LAMB: `fleetx.optim.lamb.lamb_update` for a whole model in one launch.

The direction is computed twice, from moments that are still in the cache, rather than kept: the gradient stays as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    APPLY,
    CHUNKS,
    DECAYED,
    FIRST,
    FIRST_CHUNK,
    GRAD,
    GROUP_WIDTH,
    MEASURE,
    NUMEL,
    ROW,
    SCALE_WIDTH,
    SECOND,
    STEP,
    WHOLE,
    announce,
    arrive,
    number,
    parts,
    pointer_to,
    read,
    read_weight,
    total,
    wait_for,
    write,
    write_weight,
)

LR, BETA1, BETA2, EPS, DECAY, SIGN, REST1, REST2 = map(tl.constexpr, range(8))
"""REST: 1 - beta, from float64."""


@triton.jit
def trust_ratio(squared_weight, squared_direction):
    weight, direction = tl.sqrt_rn(squared_weight), tl.sqrt_rn(squared_direction)
    return tl.where((weight > 0) & (direction > 0), weight / direction, 1.0)


@triton.jit
def power(base, exponent):
    """By squaring, in float64: 1 - beta2^t loses four digits in float32."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit
def corrections(row, group):
    """1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t) of the coming step."""
    step = (tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))) + 1.0).to(tl.int32)
    first = 1.0 - power(tl.load(group + BETA1), step)
    second = 1.0 - power(tl.load(group + BETA2), step)
    return (1.0 / first).to(tl.float32), (1.0 / tl.sqrt(second)).to(tl.float32)


@triton.jit
def direction(weight, mean, square, correction1, correction2, decay, eps):
    return mean * correction1 / (tl.sqrt(square) * correction2 + eps) + decay * weight


@triton.jit
def advance(row, start, left, group, kind, element: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
            FULL: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """New moments, and the squared norms of weight and direction. Unless its tensor is larger and adapted: the update too."""
    weight = read_weight(row, start, left, element, CHUNK, FULL, KEEP)
    grad = number(group, SIGN) * read(pointer_to(row, GRAD, start, element, ALIGNED), left, CHUNK, FULL, "evict_first")
    mean_place, square_place = pointer_to(row, FIRST, start, tl.float32, True), pointer_to(row, SECOND, start, tl.float32, True)
    mean, square = read(mean_place, left, CHUNK, FULL, KEEP), read(square_place, left, CHUNK, FULL, KEEP)
    mean = number(group, BETA1) * mean + number(group, REST1) * grad
    square = number(group, BETA2) * square + number(group, REST2) * grad * grad
    write(mean_place, mean, left, tl.float32, CHUNK, FULL, KEEP)
    write(square_place, square, left, tl.float32, CHUNK, FULL, KEEP)
    decay = number(group, DECAY) * tl.load(row + DECAYED).to(tl.float32)
    correction1, correction2 = corrections(row, group)
    found = direction(weight, mean, square, correction1, correction2, decay, number(group, EPS))
    squared_weight, squared_direction = tl.sum(weight * weight), tl.sum(found * found)
    if kind != MEASURE:
        ratio = tl.full((), 1.0, tl.float32)
        if kind == WHOLE:
            ratio = trust_ratio(squared_weight, squared_direction)
        new_weight = weight - number(group, LR) * ratio * found
        write_weight(row, new_weight, start, left, element, CHUNK, FULL, "evict_first")
    return squared_weight, squared_direction


@triton.jit
def apply(row, start, left, ready, scales, group, element: tl.constexpr, CHUNK: tl.constexpr, FULL: tl.constexpr):
    weight = read_weight(row, start, left, element, CHUNK, FULL, "evict_first")
    decay = number(group, DECAY) * tl.load(row + DECAYED).to(tl.float32)
    wait_for(ready)  # before the moments are read: another program has written them
    mean = read(pointer_to(row, FIRST, start, tl.float32, True), left, CHUNK, FULL, "evict_first")
    square = read(pointer_to(row, SECOND, start, tl.float32, True), left, CHUNK, FULL, "evict_first")
    rate = tl.load(scales, cache_modifier=".cg")
    correction1, correction2 = tl.load(scales + 1, cache_modifier=".cg"), tl.load(scales + 2, cache_modifier=".cg")
    found = direction(weight, mean, square, correction1, correction2, decay, number(group, EPS))
    write_weight(row, weight - rate * found, start, left, element, CHUNK, FULL, "evict_first")


@triton.jit
def settle(row, tensor, group, weight_sums, direction_sums, scales, ratios, kind):
    """The last chunk of a tensor is measured: its ratio, what APPLY needs of this step, and the step's count."""
    ratio = tl.full((), 1.0, tl.float32)
    if (kind == MEASURE) | (kind == WHOLE):
        first_chunk, count = tl.load(row + FIRST_CHUNK), tl.load(row + CHUNKS).to(tl.int32)
        ratio = trust_ratio(total(weight_sums + first_chunk, count), total(direction_sums + first_chunk, count))
    correction1, correction2 = corrections(row, group)
    tl.store(scales + tensor * SCALE_WIDTH, number(group, LR) * ratio)
    tl.store(scales + tensor * SCALE_WIDTH + 1, correction1)
    tl.store(scales + tensor * SCALE_WIDTH + 2, correction2)
    tl.store(ratios + tensor, ratio)
    step = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    tl.store(step, tl.load(step) + 1.0)


@triton.jit
def lamb_kernel(items, queue, rows, groups, weight_sums, direction_sums, arrived, ready, scales, ratios,
                element: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, KEEP: tl.constexpr,
                TICKET: tl.constexpr):  # fmt: skip
    # By ticket: a program's number says nothing of when it starts, and order.py relies on the order.
    if TICKET:
        item = tl.atomic_add(queue, 1, sem="relaxed")
    else:
        item = tl.program_id(0)
    kind, group_number, tensor, chunk = parts(tl.load(items + item))
    row, group = rows + tensor * ROW, groups + group_number * GROUP_WIDTH
    start = chunk * CHUNK
    left = tl.minimum(tl.load(row + NUMEL) - start, CHUNK).to(tl.int32)
    if kind == APPLY:
        if left == CHUNK:
            apply(row, start, left, ready + tensor, scales + tensor * SCALE_WIDTH, group, element, CHUNK, True)
        else:
            apply(row, start, left, ready + tensor, scales + tensor * SCALE_WIDTH, group, element, CHUNK, False)
    else:
        if left == CHUNK:
            squares = advance(row, start, left, group, kind, element, ALIGNED, CHUNK, True, KEEP)
        else:
            squares = advance(row, start, left, group, kind, element, ALIGNED, CHUNK, False, KEEP)
        slot = tl.load(row + FIRST_CHUNK) + chunk
        tl.store(weight_sums + slot, squares[0])
        tl.store(direction_sums + slot, squares[1])
        if arrive(arrived + tensor, tl.load(row + CHUNKS).to(tl.int32)):
            settle(row, tensor, group, weight_sums, direction_sums, scales, ratios, kind)
            announce(ready + tensor)
