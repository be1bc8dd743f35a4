"""The kernels of LARS: `fleetx.optim.lars.lars_update` for a whole model in three launches."""

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
    ROW,
    SCALE_WIDTH,
    WHOLE,
    item_of,
    number,
    pointer_to,
    read,
    read_weight,
    total,
    write,
    write_weight,
)

LR, MOMENTUM, DECAY, COEFFICIENT, EPSILON, SIGN = map(tl.constexpr, range(6))


@triton.jit
def trust_ratio(squared_weight, squared_grad, decay, group):
    weight, grad = tl.sqrt_rn(squared_weight), tl.sqrt_rn(squared_grad)
    ratio = number(group, COEFFICIENT) * weight / (grad + decay * weight + number(group, EPSILON))
    return tl.where((weight > 0) & (grad > 0), ratio, 1.0)


@triton.jit
def decay_of(row, group):
    return number(group, DECAY) * tl.load(row + DECAYED).to(tl.float32)


@triton.jit
def squares(row, start, left, element: tl.constexpr, ALIGNED: tl.constexpr, READ_WEIGHT: tl.constexpr,
            READ_GRAD: tl.constexpr, CHUNK: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Return the squared norms of a chunk's weight and gradient, 0 for one that is not read."""
    squared_weight, squared_grad = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if READ_WEIGHT:
        weight = read_weight(row, start, left, element, CHUNK, FULL, "")
        squared_weight = tl.sum(weight * weight)
    if READ_GRAD:
        grad = read(pointer_to(row, GRAD, start, element, ALIGNED), left, CHUNK, FULL, "")
        squared_grad = tl.sum(grad * grad)
    return squared_weight, squared_grad


@triton.jit(do_not_specialize=["n_tensors"])
def lars_measure(items, rows, weight_sums, grad_sums, n_tensors, element: tl.constexpr, ALIGNED: tl.constexpr,
                 READ_WEIGHT: tl.constexpr, READ_GRAD: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    kind, row, group, tensor, chunk, start, left = item_of(items, rows, n_tensors, CHUNK)  # noqa: RUF059
    slot = tl.load(row + FIRST_CHUNK) + chunk
    if left == CHUNK:
        squared = squares(row, start, left, element, ALIGNED, READ_WEIGHT, READ_GRAD, CHUNK, True)
    else:
        squared = squares(row, start, left, element, ALIGNED, READ_WEIGHT, READ_GRAD, CHUNK, False)
    if READ_WEIGHT:
        tl.store(weight_sums + slot, squared[0])
    if READ_GRAD:
        tl.store(grad_sums + slot, squared[1])


@triton.jit(do_not_specialize=["n_tensors"])
def lars_settle(settled, rows, weight_sums, grad_sums, scales, ratios, n_tensors, READ_GRAD: tl.constexpr):
    """Compute the rate of a tensor whose norms were measured."""
    word = tl.load(settled + tl.program_id(0))
    tensor, group_number = (word & 0xFFFFFFFF).to(tl.int32), (word >> 32).to(tl.int32)
    row, group = rows + tensor * ROW, rows + n_tensors * ROW + group_number * GROUP_WIDTH
    first_chunk, count = tl.load(row + FIRST_CHUNK), tl.load(row + CHUNKS).to(tl.int32)
    if READ_GRAD:
        squared_grad = total(grad_sums + first_chunk, count)
    else:
        norm = tl.load(tl.load(row + GRAD_NORM).to(tl.pointer_type(tl.float32)))
        squared_grad = norm * norm
    ratio = trust_ratio(total(weight_sums + first_chunk, count), squared_grad, decay_of(row, group), group)
    tl.store(scales + tensor * SCALE_WIDTH, number(group, LR) * ratio)
    tl.store(ratios + tensor, ratio)


@triton.jit
def update(row, group, start, left, kind, scale, element: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    """Update velocity and weight of a chunk; return the ratio (of a WHOLE item) and the new weight's squared norm."""
    weight = read_weight(row, start, left, element, CHUNK, FULL, "evict_first")
    grad = number(group, SIGN) * read(pointer_to(row, GRAD, start, element, ALIGNED), left, CHUNK, FULL, "evict_first")
    place = pointer_to(row, FIRST, start, tl.float32, True)
    velocity = read(place, left, CHUNK, FULL, "evict_first")
    decay, rate, ratio = decay_of(row, group), number(group, LR), tl.full((), 1.0, tl.float32)
    if kind == APPLY:
        rate = tl.load(scale)
    if kind == WHOLE:
        ratio = trust_ratio(tl.sum(weight * weight), tl.sum(grad * grad), decay, group)
        rate = rate * ratio
    velocity = number(group, MOMENTUM) * velocity + rate * (grad + decay * weight)
    weight = weight - velocity
    write(place, velocity, left, tl.float32, CHUNK, FULL)
    write_weight(row, weight, start, left, element, CHUNK, FULL)
    return ratio, tl.sum(weight * weight)


@triton.jit(do_not_specialize=["n_tensors"])
def lars_apply(items, rows, weight_sums, scales, ratios, found, n_tensors, element: tl.constexpr, ALIGNED: tl.constexpr,
               CARRY: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    kind, row, group, tensor, chunk, start, left = item_of(items, rows, n_tensors, CHUNK)
    scale = scales + tensor * SCALE_WIDTH
    if tl.load(found) == 0.0:
        if left == CHUNK:
            done = update(row, group, start, left, kind, scale, element, ALIGNED, CHUNK, True)
        else:
            done = update(row, group, start, left, kind, scale, element, ALIGNED, CHUNK, False)
        if kind == WHOLE:
            tl.store(ratios + tensor, done[0])
        if CARRY:
            tl.store(weight_sums + tl.load(row + FIRST_CHUNK) + chunk, done[1])
    elif CARRY:  # the host takes the sums to be those of the weights, whatever was found
        if left == CHUNK:
            squared = squares(row, start, left, element, ALIGNED, True, False, CHUNK, True)
        else:
            squared = squares(row, start, left, element, ALIGNED, True, False, CHUNK, False)
        tl.store(weight_sums + tl.load(row + FIRST_CHUNK) + chunk, squared[0])
