"""Large buffers outside norm layers, and complex ones: they travel at the update boundaries at which some rank has changed one.

Most are constants, so that they have no place in what travels with every update. A rank that has written to one puts that into
the alarms, whose sum all ranks know; then all of them are here together, and each knows which ones the others have changed.

Nothing is remembered from one time to the next: rank 0's values are broadcast, and the mean difference from them is added. So
an entry that is the same on all ranks stays the same to the bit, and a constant table costs no second copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import final

import torch
from torch import Tensor

from ...dist.comm import Comm
from ...errors import warn_user
from ..setup.placement import plain_name
from .buffer_kinds import Mark, SortedBuffers, apply_change, average_of_change, buffer_of, is_unchanged, mark_of


@final
class Tables:
    def __init__(self, buffers: SortedBuffers, device: torch.device) -> None:
        self.owners, self._device, self._reported = buffers.tables, device, buffers.reported
        self.let_go: set[str] = set()
        """Names of those that have different shapes on the ranks, and are each rank's own since."""
        self._newly_let_go: list[str] = []
        self._shapes = {name: list(buffer_of(owner).shape) for name, owner in self.owners.items()}
        self._marks: dict[str, Mark | None] = {}
        """Mark of each buffer when all ranks had the same; None where a checkpoint says that it had changed before it was
        saved."""
        self.resume(())

    def names(self) -> set[str]:
        return set(self.owners)

    def resume(self, changed: Collection[str]) -> None:
        """Take what the buffers hold now as common to all ranks; but `changed` was not, on this rank, when it was saved."""
        self._marks = {name: None if name in changed else mark_of(buffer_of(owner)) for name, owner in self.owners.items()}

    def changed(self) -> list[str]:
        """List the buffers that this rank has written to or replaced since all ranks had the same."""
        found = []
        for name, mark in self._marks.items():
            if mark is None or not is_unchanged(mark, buffer_of(self.owners[name])):
                found.append(name)
        return found

    @torch.no_grad()
    def make_equal(self, comm: Comm, *, reports: bool = True) -> set[str]:
        """Make changed buffers equal; every rank is here, and some rank has changed one. Return the names of those that were
        unequal for the first time."""
        names = self._changed_anywhere(comm)
        unequal = [self._make_one_equal(name, comm) for name in names]
        for name in names:
            self._marks[name] = mark_of(buffer_of(self.owners[name]))
        flags = {name: flag for name, flag in zip(names, unequal, strict=True) if reports and name not in self._reported}
        return self._unreported(flags, comm)

    def _changed_anywhere(self, comm: Comm) -> list[str]:
        """List what some rank has changed, in one order on every rank."""
        ranks = comm.gather_json({name: list(buffer_of(self.owners[name]).shape) for name in self.changed()})
        for name in sorted({name for shapes in ranks for name in shapes}):
            seen = [shapes.get(name, self._shapes[name]) for shapes in ranks]
            self._shapes[name] = seen[0]  # a table that grows (rotary positions) may do so, if all ranks have the same
            if any(shape != seen[0] for shape in seen):
                self._let_go(name)
        named = {name for shapes in ranks for name in shapes}
        return [name for name in self.owners if name in named]

    def _let_go(self, name: str) -> None:
        """Leave a buffer to each rank: different shapes would break the collective of all. Every rank does the same."""
        del self.owners[name], self._marks[name]
        self.let_go.add(name)
        self._newly_let_go.append(name)

    def warn_of_let_go(self) -> None:
        """Warn on rank 0, after the last collective: a warning may have been made an error."""
        names, self._newly_let_go = [plain_name(name) for name in self._newly_let_go], []
        for name in names:
            warn_user(
                f"buffer `{name}` has different shapes on the ranks, so that it cannot be averaged: from now on each rank keeps "
                f'its own. If that is intended, write strategy.local_buffers = ["{name}"].',
            )

    def _make_one_equal(self, name: str, comm: Comm) -> Tensor:
        """Make one buffer equal on all ranks; return whether this rank's was unlike rank 0's."""
        module, key = self.owners[name]
        buffer = buffer_of((module, key))
        mine = _real(buffer).to(self._device).contiguous()
        first = mine.clone()
        comm.broadcast(first.view(-1).view(torch.uint8)).wait()  # bytes: any type
        both_nan = (mine != mine) & (first != first)
        unequal = ((mine != first) & ~both_nan).any()
        common = first
        if first.is_floating_point():
            wide = torch.float64 if first.dtype == torch.float64 else torch.float32
            change = average_of_change(mine.to(wide), first.to(wide), comm.size)
            comm.all_reduce(change).wait()
            common = apply_change(first.to(wide), change).to(first.dtype)
        if 0 in buffer.stride():  # an expanded tensor, which was put in place of the first: it cannot be written to
            module._buffers[key] = common if not buffer.is_complex() else torch.view_as_complex(common)
        else:
            _real(buffer).copy_(common)
        return unequal

    def _unreported(self, flags: Mapping[str, Tensor], comm: Comm) -> set[str]:
        """Name those that were unequal on some rank, for the first time. `flags` has the same names on all ranks, so that all of
        them reduce, or none does."""
        if not flags:
            return set()
        counts = torch.stack(list(flags.values())).to(torch.int32)
        comm.all_reduce(counts).wait()
        names = {name for name, count in zip(flags, counts.tolist(), strict=True) if count}
        self._reported |= names
        return names

    # --- a mean that is shown for a while ---------------------------------------------------------------------------

    def own(self) -> dict[str, Tensor]:
        return {name: buffer_of(owner).clone() for name, owner in self.owners.items()}

    @torch.no_grad()
    def put_back(self, own: Mapping[str, Tensor]) -> None:
        """Put this rank's own values back. Those unlike the mean count as changed again, as they did; what was let go meanwhile
        stays as it was."""
        for name, kept in own.items():
            if name in self.owners and not torch.equal(buffer_of(self.owners[name]), kept):
                buffer_of(self.owners[name]).copy_(kept)


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
