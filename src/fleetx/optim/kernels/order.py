"""Which program works on which chunk, and in which order: a pure function of a model's sizes.

    WHOLE      a tensor of one chunk: measured and updated in registers
    DIRECT     a chunk of a tensor that is not adapted: nothing to wait for
    MEASURE    a chunk's share of its tensor's norms
    APPLY      a chunk's update: waits until all chunks of its tensor are measured
    SETTLE     a tensor whose norms are known beforehand: only its ratio is to be computed

Each program has a list of its own, and applies the very chunks that it has measured: they are in the cache nearest to it.
APPLY follows MEASURE so closely that they still are, and so far behind (`lag` items) that as a rule nobody waits. Of one
tensor it goes backwards: what was read last is found first, also where a tensor is larger than the cache.

No deadlock: every program runs from the start (the launch is cooperative), and APPLY of a tensor stands in any list only
behind measurements of the same tensor and of those before it; so the earliest tensor not yet measured waits for nobody.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KIND_SHIFT, GROUP_SHIFT, TENSOR_SHIFT = 60, 48, 28
MOST_GROUPS, MOST_TENSORS, MOST_CHUNKS = 2 ** (KIND_SHIFT - GROUP_SHIFT), 2 ** (GROUP_SHIFT - TENSOR_SHIFT), 2**TENSOR_SHIFT


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


@dataclass(slots=True)
class Program:
    """One program's items, and its measured chunks that are still to be applied, each with the place where that is due."""

    items: list[Item] = field(default_factory=list)
    waiting: deque[tuple[int, Item]] = field(default_factory=deque)

    def add(self, item: Item) -> None:
        self.items.append(item)
        while self.waiting and self.waiting[0][0] <= len(self.items):
            self.items.append(self.waiting.popleft()[1])

    def apply_later(self, tensor: int, chunks: Iterable[int], *, lag: int) -> None:
        self.waiting.extend((len(self.items) + lag, Item(Kind.APPLY, tensor, chunk)) for chunk in chunks)

    def finish(self) -> None:
        self.items += [item for _, item in self.waiting]
        self.waiting.clear()


def chunks_of(numel: int, chunk_elements: int) -> int:
    return -(-numel // chunk_elements)


def work_order(
    chunks: Sequence[int], adapted: Sequence[bool], *, programs: int, lag: int, measured: bool = False
) -> list[list[Item]]:
    """One list of items per program. `measured`: all norms are known beforehand."""
    everyone = [Program() for _ in range(programs)]
    turn = 0
    large = [t for t, count in enumerate(chunks) if adapted[t] and (count > 1 or measured)]
    for tensor in large:
        mine: dict[int, list[int]] = {}
        for chunk in range(chunks[tensor]):
            mine.setdefault(turn % programs, []).append(chunk)
            if not measured:
                everyone[turn % programs].add(Item(Kind.MEASURE, tensor, chunk))
            elif chunk == 0:
                everyone[turn % programs].add(Item(Kind.SETTLE, tensor, 0))
            turn += 1
        for program, kept in mine.items():
            everyone[program].apply_later(tensor, reversed(kept), lag=lag)
    for tensor in sorted(set(range(len(chunks))) - set(large)):
        for chunk in range(chunks[tensor]):
            everyone[turn % programs].add(Item(Kind.WHOLE if adapted[tensor] else Kind.DIRECT, tensor, chunk))
            turn += 1
    for program in everyone:
        program.finish()
    return [program.items for program in everyone]
