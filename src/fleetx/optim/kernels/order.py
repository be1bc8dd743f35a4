"""List the chunks that each launch works on: a pure function of a model's sizes.

    WHOLE      a tensor of one chunk: norms and update in registers, in one launch
    DIRECT     a chunk of a tensor that is not adapted: updated in one launch
    MEASURE    a chunk's share of its tensor's norms
    APPLY      a chunk's update, when its tensor's ratio is known

Between MEASURE and APPLY one small launch computes the ratios. A single launch that waits inside, from a queue or with a list
per program, was 2 to 13 % slower, though it finds measured chunks in the second-level cache. APPLY goes backwards through the
model, so that the chunks measured last are still there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

KIND_SHIFT, GROUP_SHIFT, TENSOR_SHIFT = 60, 48, 28
MOST_GROUPS = 2 ** (KIND_SHIFT - GROUP_SHIFT)


class Kind(enum.IntEnum):
    WHOLE = 0
    DIRECT = 1
    MEASURE = 2
    APPLY = 3


class Item(NamedTuple):
    kind: Kind
    group: int
    tensor: int
    chunk: int

    def word(self) -> int:
        """Pack into the integer that the kernels read."""
        return self.kind << KIND_SHIFT | self.group << GROUP_SHIFT | self.tensor << TENSOR_SHIFT | self.chunk


class Work(NamedTuple):
    """The items of one step."""

    at_once: list[Item]
    """WHOLE and DIRECT items, which depend on no other."""
    measure: list[Item]
    apply: list[Item]


def chunks_of(numel: int, chunk_elements: int) -> int:
    return -(-numel // chunk_elements)


def work_items(chunks: Sequence[int], adapted: Sequence[bool], groups: Sequence[int], *, measured: bool = False) -> Work:
    """Make the items of a step; `measured`: all norms are known before it, those of small tensors too."""
    work = Work([], [], [])
    for tensor, (count, group) in enumerate(zip(chunks, groups, strict=True)):
        if not adapted[tensor]:
            work.at_once.extend(Item(Kind.DIRECT, group, tensor, chunk) for chunk in range(count))
        elif count == 1 and not measured:
            work.at_once.append(Item(Kind.WHOLE, group, tensor, 0))
        else:
            work.apply.extend(Item(Kind.APPLY, group, tensor, chunk) for chunk in range(count))
            if not measured:
                work.measure.extend(Item(Kind.MEASURE, group, tensor, chunk) for chunk in range(count))
    work.apply.reverse()
    return work
