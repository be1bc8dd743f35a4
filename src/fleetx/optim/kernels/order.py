"""In which order the chunks of a model are worked on: a pure function of its sizes.

    WHOLE      a tensor of one chunk: measured and updated in registers
    DIRECT     a chunk of a tensor that is not adapted: nothing to wait for
    MEASURE    a chunk's share of its tensor's norms
    APPLY      a chunk's update: waits until its tensor is measured
    SETTLE     a tensor whose norms are known beforehand: only its ratio is to be computed

Each program takes one item. APPLY follows MEASURE so closely that what was read is still in the second-level cache, and
so far behind (`lag` items) that nobody waits: the items in between keep the processors busy while the last measurements
end. Within a tensor APPLY goes backwards: what was read last is found first, also where a tensor is larger than the cache.

Items are taken in this order, by a ticket, and an item waits only for items before it: whoever holds the earliest
unfinished item never waits, so the work always ends, with any number of processors.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

KIND_SHIFT, GROUP_SHIFT, TENSOR_SHIFT = 60, 48, 28


class Kind(enum.IntEnum):
    WHOLE = 0
    DIRECT = 1
    MEASURE = 2
    APPLY = 3
    SETTLE = 4


class Item(NamedTuple):
    kind: Kind
    tensor: int
    chunk: int

    def word(self, group: int) -> int:
        """As the kernels read it."""
        return self.kind << KIND_SHIFT | group << GROUP_SHIFT | self.tensor << TENSOR_SHIFT | self.chunk


def chunks_of(numel: int, chunk_elements: int) -> int:
    return -(-numel // chunk_elements)


def work_order(chunks: Sequence[int], adapted: Sequence[bool], *, lag: int, measured: bool = False) -> list[Item]:
    """`measured`: all norms are known beforehand."""
    large = [t for t, count in enumerate(chunks) if adapted[t] and (count > 1 or measured)]
    small = [
        Item(Kind.WHOLE if adapted[t] else Kind.DIRECT, t, chunk)
        for t in sorted(set(range(len(chunks))) - set(large))
        for chunk in range(chunks[t])
    ]
    return list(_interleaved(_measurements(large, chunks, measured=measured), small, chunks, lag=lag))


def _measurements(tensors: Iterable[int], chunks: Sequence[int], *, measured: bool) -> Iterator[Item]:
    for tensor in tensors:
        if measured:
            yield Item(Kind.SETTLE, tensor, 0)
        else:
            yield from (Item(Kind.MEASURE, tensor, chunk) for chunk in range(chunks[tensor]))


def _interleaved(measurements: Iterator[Item], small: Sequence[Item], chunks: Sequence[int], *, lag: int) -> Iterator[Item]:
    """Each tensor's APPLY items as soon as `lag` items follow its last measurement; small tensors fill the last gap."""
    waiting: deque[tuple[int, int]] = deque()
    emitted = 0
    previous: int | None = None

    def due(now: int) -> Iterator[Item]:
        while waiting and waiting[0][0] <= now:
            tensor = waiting.popleft()[1]
            yield from (Item(Kind.APPLY, tensor, chunk) for chunk in reversed(range(chunks[tensor])))

    for item in measurements:
        if previous is not None and item.tensor != previous:
            waiting.append((emitted + lag, previous))
        previous = item.tensor
        yield from due(emitted)
        yield item
        emitted += 1
    if previous is not None:
        waiting.append((emitted + lag, previous))
    for item in small:
        yield from due(emitted)
        yield item
        emitted += 1
    yield from due(emitted + lag)
