"""Share between the kernels of LARS and LAMB: the table, and reading and writing chunks by address.

A row of the table describes one tensor: addresses first, then sizes. Below the rows are the settings of each group.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW_WORDS = 11
"""Row: parameter, gradient, first moment, second moment, master, step, |g|, numel, first chunk, chunks, decayed."""
PARAM, GRAD, FIRST, SECOND, MASTER, STEP, GRAD_NORM = map(tl.constexpr, range(7))
NUMEL, FIRST_CHUNK, CHUNKS, DECAYED = map(tl.constexpr, range(7, 11))
ROW = tl.constexpr(ROW_WORDS)
GROUP_NUMBERS = 8
GROUP_WIDTH = tl.constexpr(GROUP_NUMBERS)
SCALES = 4
SCALE_WIDTH = tl.constexpr(SCALES)
WHOLE, DIRECT, MEASURE, APPLY = map(tl.constexpr, range(4))
KIND_SHIFT, GROUP_SHIFT, TENSOR_SHIFT = map(tl.constexpr, (60, 48, 28))
GROUP_MASK, TENSOR_MASK, CHUNK_MASK = map(tl.constexpr, (0xFFF, 0xFFFFF, 0xFFFFFFF))
REDUCE_WIDTH = tl.constexpr(1024)


@triton.jit
def item_of(items, rows, n_tensors, CHUNK: tl.constexpr):
    """Decode this program's item: kind, row, group, tensor, chunk, first element and number of elements."""
    word = tl.load(items + tl.program_id(0))
    tensor, chunk = ((word >> TENSOR_SHIFT) & TENSOR_MASK).to(tl.int32), word & CHUNK_MASK
    row = rows + tensor * ROW
    group = rows + n_tensors * ROW + ((word >> GROUP_SHIFT) & GROUP_MASK).to(tl.int32) * GROUP_WIDTH
    start = chunk * CHUNK
    left = tl.minimum(tl.load(row + NUMEL) - start, CHUNK).to(tl.int32)
    return (word >> KIND_SHIFT).to(tl.int32), row, group, tensor, chunk, start, left


@triton.jit
def exactly(group, column: tl.constexpr):
    """Read a setting of a group in float64, which the table holds as bits."""
    return tl.load(group + column).to(tl.float64, bitcast=True)


@triton.jit
def number(group, column: tl.constexpr):
    return exactly(group, column).to(tl.float32)


@triton.jit
def pointer_to(row, column: tl.constexpr, start, element: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address of a chunk in one of a tensor's arrays; ALIGNED promises accesses of four elements at a time.

    Four also for 16-bit types: with eight, a thread would hold other elements of them than of the float32 arrays, and Triton
    would send one of the two through shared memory.
    """
    pointer = tl.load(row + column).to(tl.pointer_type(element))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 4 * element.primitive_bitwidth // 8)
    return pointer + start


@triton.jit
def read(pointer, left, CHUNK: tl.constexpr, FULL: tl.constexpr, POLICY: tl.constexpr):
    """Read a chunk as float32, zero beyond the tensor's end. A full chunk needs no mask, which would forbid wide loads."""
    place = tl.arange(0, CHUNK)
    if FULL:
        values = tl.load(pointer + place, eviction_policy=POLICY)
    else:
        values = tl.load(pointer + place, mask=place < left, other=0.0, eviction_policy=POLICY)
    return values.to(tl.float32)


@triton.jit
def write(pointer, value, left, element: tl.constexpr, CHUNK: tl.constexpr, FULL: tl.constexpr):
    place = tl.arange(0, CHUNK)
    if FULL:
        tl.store(pointer + place, value.to(element))
    else:
        tl.store(pointer + place, value.to(element), mask=place < left)


@triton.jit
def read_weight(row, start, left, element: tl.constexpr, CHUNK: tl.constexpr, FULL: tl.constexpr, POLICY: tl.constexpr):
    """Read the weight as float32: a 16-bit parameter's master copy, unless other code has written the parameter since."""
    weight = read(pointer_to(row, PARAM, start, element, True), left, CHUNK, FULL, POLICY)
    if element != tl.float32:
        master = read(pointer_to(row, MASTER, start, tl.float32, True), left, CHUNK, FULL, POLICY)
        weight = tl.where(master.to(element).to(tl.float32) == weight, master, weight)
    return weight


@triton.jit
def write_weight(row, weight, start, left, element: tl.constexpr, CHUNK: tl.constexpr, FULL: tl.constexpr):
    write(pointer_to(row, PARAM, start, element, True), weight, left, element, CHUNK, FULL)
    if element != tl.float32:
        write(pointer_to(row, MASTER, start, tl.float32, True), weight, left, tl.float32, CHUNK, FULL)


@triton.jit
def total(partials, count):
    """Sum in a fixed order: the same bits in every run."""
    place = tl.arange(0, REDUCE_WIDTH)
    sums = tl.zeros([REDUCE_WIDTH], dtype=tl.float32)
    begin = count * 0
    while begin < count:
        sums += tl.load(partials + begin + place, mask=begin + place < count, other=0.0)
        begin += REDUCE_WIDTH
    return tl.sum(sums)
