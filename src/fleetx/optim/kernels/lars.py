"""The kernel of LARS: `fleetx.optim.lars.lars_update` for a whole model in one launch."""

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
    GRAD_NORM,
    GROUP_WIDTH,
    MEASURE,
    NUMEL,
    ROW,
    SETTLE,
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

LR, MOMENTUM, DECAY, COEFFICIENT, EPSILON, SIGN = map(tl.constexpr, range(6))
GROUP_KEYS = ("lr", "momentum", "lars_weight_decay", "lars_coeff", "epsilon")


@triton.jit
def trust_ratio(squared_weight, squared_grad, decay, group):
    weight, grad = tl.sqrt_rn(squared_weight), tl.sqrt_rn(squared_grad)
    ratio = number(group, COEFFICIENT) * weight / (grad + decay * weight + number(group, EPSILON))
    return tl.where((weight > 0) & (grad > 0), ratio, 1.0)


@triton.jit
def measure(row, start, left, element: tl.constexpr, ALIGNED: tl.constexpr, READ_WEIGHT: tl.constexpr,
            READ_GRAD: tl.constexpr, CHUNK: tl.constexpr, FULL: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    squared_weight, squared_grad = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if READ_WEIGHT:
        weight = read_weight(row, start, left, element, CHUNK, FULL, KEEP)
        squared_weight = tl.sum(weight * weight)
    if READ_GRAD:
        grad = read(pointer_to(row, GRAD, start, element, ALIGNED), left, CHUNK, FULL, KEEP)
        squared_grad = tl.sum(grad * grad)
    return squared_weight, squared_grad


@triton.jit
def apply(row, start, left, kind, ready, rates, group, element: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
          FULL: tl.constexpr):  # fmt: skip
    """Update one chunk; if it is a whole tensor, its ratio is found here. Returns the ratio and the new squared norm."""
    weight = read_weight(row, start, left, element, CHUNK, FULL, "evict_first")
    grad = number(group, SIGN) * read(pointer_to(row, GRAD, start, element, ALIGNED), left, CHUNK, FULL, "evict_first")
    place = pointer_to(row, FIRST, start, tl.float32, True)
    velocity = read(place, left, CHUNK, FULL, "evict_first")
    decay = number(group, DECAY) * tl.load(row + DECAYED).to(tl.float32)
    ratio, rate = tl.full((), 1.0, tl.float32), number(group, LR)
    if kind == WHOLE:
        ratio = trust_ratio(tl.sum(weight * weight), tl.sum(grad * grad), decay, group)
        rate = rate * ratio
    if kind == APPLY:
        wait_for(ready)  # with all reads under way
        rate = tl.load(rates, cache_modifier=".cg")
    velocity = number(group, MOMENTUM) * velocity + rate * (grad + decay * weight)
    weight = weight - velocity
    write(place, velocity, left, tl.float32, CHUNK, FULL, "evict_first")
    write_weight(row, weight, start, left, element, CHUNK, FULL, "evict_first")
    return ratio, tl.sum(weight * weight)


@triton.jit
def settle(row, tensor, group, weight_sums, grad_sums, rates, ratios, READ_GRAD: tl.constexpr):
    """The ratio of a tensor that is measured."""
    first_chunk, count = tl.load(row + FIRST_CHUNK), tl.load(row + CHUNKS).to(tl.int32)
    squared_weight = total(weight_sums + first_chunk, count)
    if READ_GRAD:
        squared_grad = total(grad_sums + first_chunk, count)
    else:
        norm = tl.load(tl.load(row + GRAD_NORM).to(tl.pointer_type(tl.float32)))
        squared_grad = norm * norm
    decay = number(group, DECAY) * tl.load(row + DECAYED).to(tl.float32)
    ratio = trust_ratio(squared_weight, squared_grad, decay, group)
    tl.store(rates + tensor, number(group, LR) * ratio)
    tl.store(ratios + tensor, ratio)


@triton.jit
def lars_kernel(items, queue, rows, groups, weight_sums, grad_sums, arrived, ready, rates, ratios,
                element: tl.constexpr, ALIGNED: tl.constexpr, READ_WEIGHT: tl.constexpr, READ_GRAD: tl.constexpr,
                CARRY: tl.constexpr, CHUNK: tl.constexpr, KEEP: tl.constexpr, TICKET: tl.constexpr):  # fmt: skip
    # By ticket: a program's number says nothing of when it starts, and order.py relies on the order.
    if TICKET:
        item = tl.atomic_add(queue, 1, sem="relaxed")
    else:
        item = tl.program_id(0)
    kind, group_number, tensor, chunk = parts(tl.load(items + item))
    row, group = rows + tensor * ROW, groups + group_number * GROUP_WIDTH
    start = chunk * CHUNK
    left = tl.minimum(tl.load(row + NUMEL) - start, CHUNK).to(tl.int32)
    slot = tl.load(row + FIRST_CHUNK) + chunk
    if (kind == MEASURE) | (kind == SETTLE):
        awaited = tl.full((), 1, tl.int32)
        if kind == MEASURE:
            awaited = tl.load(row + CHUNKS).to(tl.int32)
            if left == CHUNK:
                squares = measure(row, start, left, element, ALIGNED, READ_WEIGHT, READ_GRAD, CHUNK, True, KEEP)
            else:
                squares = measure(row, start, left, element, ALIGNED, READ_WEIGHT, READ_GRAD, CHUNK, False, KEEP)
            if READ_WEIGHT:
                tl.store(weight_sums + slot, squares[0])
            if READ_GRAD:
                tl.store(grad_sums + slot, squares[1])
        if arrive(arrived + tensor, awaited):
            settle(row, tensor, group, weight_sums, grad_sums, rates, ratios, READ_GRAD)
            announce(ready + tensor)
    else:
        if left == CHUNK:
            done = apply(row, start, left, kind, ready + tensor, rates + tensor, group, element, ALIGNED, CHUNK, True)
        else:
            done = apply(row, start, left, kind, ready + tensor, rates + tensor, group, element, ALIGNED, CHUNK, False)
        if kind == WHOLE:
            tl.store(ratios + tensor, done[0])
        if CARRY:
            tl.store(weight_sums + slot, done[1])
