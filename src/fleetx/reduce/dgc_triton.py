"""DGC's kernels for CUDA, in Triton: three launches for all tensors of a model.

gather      update u and v by this gradient; list the places of entries that reach a bound, in any order
choose      one program per tensor: move exactly the k largest of those into the message, and zero them in u and v
add         add what a rank has sent to the gradients

The bound of a tensor comes from its last update: it makes this fast, and cannot make it wrong. Where fewer than k entries reach
it, or more than there is room for, `choose` marks the tensor as not done and leaves it as it is.

A row of the table describes one tensor: addresses first, then sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW_WORDS = 10
GRAD, U, V, WEIGHT, BUCKET, NUMEL, FIRST, ROOM, OUT, COUNT = map(tl.constexpr, range(ROW_WORDS))
"""Columns: addresses of the four rows and of the bucket; entries; first candidate, room; first entry sent, and how many."""
ROW, WEIGHT_WORD = tl.constexpr(ROW_WORDS), 3
RULE_WORDS = 3
RULE = tl.constexpr(RULE_WORDS)
MOMENTUM, DECAY, NESTEROV = map(tl.constexpr, range(RULE_WORDS))
TENSOR_SHIFT, CHUNK_MASK = tl.constexpr(32), tl.constexpr(0xFFFFFFFF)
HIGHEST_BIT = tl.constexpr(1 << 30)
"""Highest bit that the size of a float32, or a place, can have."""
LOWER, HIGHER, NEVER_ABOVE = tl.constexpr(0.93), tl.constexpr(0.3), tl.constexpr(0.995)
FEW, MANY = tl.constexpr(1.25), tl.constexpr(3.0)
"""The next bound is a share of the smallest entry sent. With fewer candidates than wanted the share falls, with more it rises."""


@triton.jit
def gather(items, rows, rules, bounds, counts, candidates, CHUNK: tl.constexpr, DECAYS: tl.constexpr):
    """Update u and v of a chunk, and list the places of entries that reach the tensor's bound."""
    word = tl.load(items + tl.program_id(0))
    tensor, chunk = (word >> TENSOR_SHIFT).to(tl.int32), word & CHUNK_MASK
    row, rule = rows + tensor * ROW, rules + tensor * RULE
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < tl.load(row + NUMEL)
    momentum = tl.load(rule + MOMENTUM)
    u_at = tl.load(row + U).to(tl.pointer_type(tl.float32)) + place
    v_at = tl.load(row + V).to(tl.pointer_type(tl.float32)) + place
    grad = tl.load(tl.load(row + GRAD).to(tl.pointer_type(tl.float32)) + place, mask=inside, other=0.0)
    if DECAYS:
        weight = tl.load(tl.load(row + WEIGHT).to(tl.pointer_type(tl.float32)) + place, mask=inside, other=0.0)
        grad += tl.load(rule + DECAY) * weight
    u = momentum * tl.load(u_at, mask=inside, other=0.0) + grad
    v = tl.load(v_at, mask=inside, other=0.0) + tl.where(tl.load(rule + NESTEROV) > 0, grad + momentum * u, u)
    tl.store(u_at, u, mask=inside)
    tl.store(v_at, v, mask=inside)
    reaches = inside & (tl.abs(v) >= tl.load(bounds + tensor))
    slot = tl.atomic_add(counts + tensor + tl.zeros([CHUNK], tl.int32), 1, mask=reaches)
    fits = reaches & (slot < tl.load(row + ROOM))
    tl.store(candidates + tl.load(row + FIRST) + slot, place.to(tl.int32), mask=fits)


@triton.jit
def at_least(sizes, count, bound, BLOCK: tl.constexpr):
    """Count candidates of at least this size."""
    begin, matches = count * 0, count * 0
    while begin < count:
        i = begin + tl.arange(0, BLOCK)
        matches += tl.sum((tl.load(sizes + i, mask=i < count, other=-1) >= bound).to(tl.int32))
        begin += BLOCK
    return matches


@triton.jit
def equal_before(sizes, places, count, size, place, BLOCK: tl.constexpr):
    """Count candidates of this size before this place."""
    begin, matches = count * 0, count * 0
    while begin < count:
        i = begin + tl.arange(0, BLOCK)
        mine = (tl.load(sizes + i, mask=i < count, other=-1) == size) & (tl.load(places + i, mask=i < count, other=0) < place)
        matches += tl.sum(mine.to(tl.int32))
        begin += BLOCK
    return matches


@triton.jit
def choose(rows, bounds, shares, counts, candidates, sizes, values_out, places_out, done, BLOCK: tl.constexpr):
    """Move a tensor's k largest candidates into the message, zero them in u and v, and set its next bound."""
    tensor = tl.program_id(0)
    row = rows + tensor * ROW
    wanted, room = tl.load(row + COUNT).to(tl.int32), tl.load(row + ROOM).to(tl.int32)
    reached = tl.load(counts + tensor)
    fits = (reached >= wanted) & (reached <= room)
    tl.store(done + tensor, fits.to(tl.int32))
    if fits:
        u = tl.load(row + U).to(tl.pointer_type(tl.float32))
        v = tl.load(row + V).to(tl.pointer_type(tl.float32))
        first = tl.load(row + FIRST)
        places, mine = candidates + first, sizes + first
        begin = reached * 0
        while begin < reached:
            i = begin + tl.arange(0, BLOCK)
            size = tl.abs(tl.load(v + tl.load(places + i, mask=i < reached, other=0), mask=i < reached, other=0.0))
            tl.store(mine + i, size.to(tl.int32, bitcast=True), mask=i < reached)
            begin += BLOCK
        tl.debug_barrier()
        # Sizes are ordered as their bits are: find the smallest size that is sent, bit by bit from the highest.
        smallest = wanted * 0
        bit = wanted * 0 + HIGHEST_BIT
        while bit > 0:
            if at_least(mine, reached, smallest | bit, BLOCK) >= wanted:
                smallest = smallest | bit
            bit = bit >> 1
        above = at_least(mine, reached, smallest + 1, BLOCK)
        last = wanted * 0 + 0x7FFFFFFF
        if at_least(mine, reached, smallest, BLOCK) > wanted:  # of equal sizes the lower places: find the last one
            last = wanted * 0
            bit = wanted * 0 + HIGHEST_BIT
            while bit > 0:
                if equal_before(mine, places, reached, smallest, last | bit, BLOCK) < wanted - above:
                    last = last | bit
                bit = bit >> 1
        offset = ((tl.load(row + GRAD) - tl.load(row + BUCKET)) // 4).to(tl.int32)
        out = tl.load(row + OUT)
        begin = reached * 0
        while begin < reached:
            i = begin + tl.arange(0, BLOCK)
            size = tl.load(mine + i, mask=i < reached, other=-1)
            place = tl.load(places + i, mask=i < reached, other=0)
            sent = (size > smallest) | ((size == smallest) & (place <= last))
            slot = out + tl.cumsum(sent.to(tl.int32), 0) - 1
            tl.store(values_out + slot, tl.load(v + place, mask=sent, other=0.0), mask=sent)
            tl.store(places_out + slot, place + offset, mask=sent)
            tl.store(v + place, tl.zeros([BLOCK], tl.float32), mask=sent)
            tl.store(u + place, tl.zeros([BLOCK], tl.float32), mask=sent)
            out += tl.sum(sent.to(tl.int32))
            begin += BLOCK
        share = tl.load(shares + tensor)
        share = tl.where(reached > MANY * wanted, share + HIGHER * (NEVER_ABOVE - share), share)
        share = tl.where(reached < FEW * wanted, share * LOWER, share)
        tl.store(shares + tensor, share)
        tl.store(bounds + tensor, share * smallest.to(tl.float32, bitcast=True))


@triton.jit
def add(items, rows, wire, entries, CHUNK: tl.constexpr):
    """Add one rank's entries; `wire` holds values, as bits, then places in the bucket. Within one rank places are distinct."""
    word = tl.load(items + tl.program_id(0))
    row = rows + (word >> TENSOR_SHIFT).to(tl.int32) * ROW
    i = (word & CHUNK_MASK) * CHUNK + tl.arange(0, CHUNK)
    inside = i < tl.load(row + COUNT)
    at = wire + tl.load(row + OUT) + i
    value = tl.load(at, mask=inside, other=0).to(tl.float32, bitcast=True)
    place = tl.load(at + entries, mask=inside, other=0)
    target = tl.load(row + BUCKET).to(tl.pointer_type(tl.float32)) + place
    tl.store(target, tl.load(target, mask=inside, other=0.0) + value, mask=inside)
