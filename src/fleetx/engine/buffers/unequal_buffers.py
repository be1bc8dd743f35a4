"""Buffers outside norm layers that the ranks have changed differently: kept equal like all others, and reported once.

A counter or an average of weights changes alike on all ranks. A hidden state, a memory bank or a queue does not, and its mean
over ranks may be nonsense; only the user knows. A rank sees it when the common value is not what it had itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import final

import torch
from torch import Tensor

from ...config.text import listed
from ...dist.comm import Comm
from ...errors import warn_user
from ..setup.placement import plain_name
from .buffer_kinds import Mark, SortedBuffers, buffer_of, is_unchanged, mark_of


def is_unequal(now: Tensor, last: Tensor, common: Tensor, size: int) -> Tensor:
    """Return whether this rank's value is not the common one, beyond the rounding of the mean of `size` equal changes."""
    tolerance = 4 * size * torch.finfo(common.dtype).eps
    return ((now - common).abs() > tolerance * (now.abs() + last.abs())).any()


def warn_of_unequal(names: Iterable[str]) -> None:
    plain = sorted(plain_name(name) for name in names)
    if not plain:
        return
    changed = listed([f"`{name}`" for name in plain], 5)
    lines = ", ".join(f'"{name}"' for name in plain[:5]) + (", ..." if len(plain) > 5 else "")
    warn_user(
        f"the ranks have changed these buffers differently: {changed}. They are kept equal with each update (floats: the mean of "
        "the changes, integers: rank 0's). If each rank is to keep its own (a hidden state, a memory bank), write "
        f"strategy.local_buffers = [{lines}].",
    )


@final
class UnequalBuffers:
    """Looks at those that this rank has written to, before the common value is put in their place."""

    def __init__(self, buffers: SortedBuffers) -> None:
        self.owners, self._reported = buffers.outside_norm_layers(), buffers.reported
        self._marks: dict[str, Mark] = {}
        self._seen: dict[str, Tensor] = {}
        """Whether each buffer that was looked at was unequal, by name. On its device: reading it there would wait."""
        self.renew_marks()

    def written(self) -> set[str]:
        """Name the buffers that this rank has written to since the last update. Costs the device nothing."""
        return {name for name, mark in self._marks.items() if not is_unchanged(mark, buffer_of(self.owners[name]))}

    def candidates(self) -> set[str]:
        """Return the written buffers that were not reported yet."""
        return self.written() - self._reported

    def note(self, name: str, unequal: Tensor) -> None:
        self._seen[name] = self._seen[name] | unequal if name in self._seen else unequal

    def renew_marks(self, but: Collection[str] = ()) -> None:
        """Mark the buffers as common to all ranks; except for those in `but`."""
        renewed = {name: mark_of(buffer_of(owner)) for name, owner in self.owners.items() if name not in but}
        self._marks = {**self._marks, **renewed}

    def count(self) -> float | Tensor:
        """Count what this rank has to report; on a GPU a tensor."""
        if not self._seen:
            return 0.0
        total = torch.stack(list(self._seen.values())).sum()
        return float(total) if total.device.type == "cpu" else total

    def gather(self, comm: Comm) -> set[str]:
        """Gather the names that no rank has reported yet. Every rank is here: the sum of their counts was not zero."""
        mine = [name for name, unequal in self._seen.items() if bool(unequal)]
        names = {name for theirs in comm.gather_json(mine) for name in theirs} - self._reported
        self._seen = {}
        self._reported |= names
        return names
