"""Notice a bit that flips by itself in the weights of a rank that trains alone, where no other rank holds the same.

after an update     sum the bits of each weight tensor in four parts, as 64-bit integers: one pass over memory
before the next     sum again. A flipped bit number b has changed one sum by exactly 2^b or -2^b; forward and backward change none
at the averaging    each rank tells whether it has found one, and the sum of what the last averaging has left, which is the same
                    on all ranks. All ranks raise, before anything is sent.

What the script itself writes between two updates is no alarm: torch counts writes to a tensor (`_version`). It does not count
those through `.data`: they are told from a flip by what they change, which is more than one part, or not by a power of two.

Small tensors on a CPU are copied and compared, since a call of torch costs more than their bytes, and summed where they differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...config.text import listed
from ...dist.comm import Comm
from ...errors import FleetError
from ..bucket import in_memory_order
from ..rank_status import Row

MOST_TIME = 0.01
"""Share of the training's time that the watch may take; where sums take longer, it leaves out some updates."""
SLACK_SECONDS = 0.2
"""Seconds that it may take in any case: the first sums bring memory into use."""
PARTS = 4
SMALLEST = 64
"""Elements of a tensor below which it is not watched: there a flip may look like what a script writes through `.data`."""
COPIED_BYTES = 2**17
"""Tensors on a CPU up to this size are copied rather than summed."""
MASTER = "master"
"""Key under which an optimizer keeps the float32 copy of a 16-bit parameter, which is what it trains."""
MARK_BITS = 52
"""A row of numbers in float64 holds integers up to this length."""


# --- pure: sums of bits -------------------------------------------------------------------------------------------------


def word_views(tensor: Tensor) -> list[Tensor]:
    """Return the tensor's memory as four rows of 64-bit words, and what is left over at its end as smaller integers."""
    row = in_memory_order(tensor.detach())
    per_row = PARTS * 8 // tensor.element_size()
    whole = len(row) - len(row) % per_row if row.storage_offset() * tensor.element_size() % 8 == 0 else 0
    words = [row[:whole].view(torch.int64).view(PARTS, -1)] if whole else []
    narrow = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return words + ([row[whole:].view(narrow)] if whole < len(row) else [])


def sum_words(views: Sequence[Sequence[Tensor]], out: Tensor) -> Tensor:
    """Write the sums of each tensor's parts into a row of `out`; they wrap around, so that one flipped bit always changes one."""
    for place, pieces in enumerate(views):
        first = pieces[0]
        if first.dim() == 2:
            torch.sum(first, 1, dtype=torch.int64, out=out[place])
        else:
            out[place].fill_(0)
        if first.dim() == 1 or len(pieces) > 1:
            out[place, -1] += pieces[-1].sum(dtype=torch.int64)
    return out


def flipped(before: Tensor, now: Tensor, is_known: Tensor) -> Tensor:
    """Return the changes of the sums if exactly one changed, by a power of two; else zeros. No wait for the device.

    `is_known`: tensors that torch has not seen written to."""
    change = torch.where(is_known.unsqueeze(1), now - before, 0)
    size = torch.where(change < 0, -change, change)  # of -2^63 too: its negative is itself, and one bit
    is_one_bit = (size & (size - 1)) == 0
    is_alone = (change != 0).sum() == 1
    return torch.where(is_one_bit & is_alone, change, 0)


def mark_of(sums: Tensor, more: int = 0) -> int:
    """Fold the sums, and one more, into one number that a float64 holds. It differs where one differs by a power of two."""
    total = (int(sums.sum()) + more) % 2**64
    folded: int = (total ^ (total >> 32)) % 2**MARK_BITS
    return folded


def bit_of(change: int, element_bytes: int) -> int:
    """Return which bit of an element has flipped, by the change of a sum of 64-bit words."""
    return (abs(change).bit_length() - 1) % (8 * element_bytes)


class Copies:
    """The memory of small tensors on a CPU side by side, as it was and as it is. Nothing is allocated in between."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._rows: list[tuple[slice, memoryview, torch.dtype]] = []
        length = 0
        for tensor in tensors:
            memory = in_memory_order(tensor.detach()).view(torch.uint8).numpy().data
            self._rows.append((slice(length, length + len(memory)), memory, tensor.dtype))
            length += len(memory) + -len(memory) % 8  # each begins with a word of its own
        self.before, self.now = bytearray(length), bytearray(length)

    def write(self, out: bytearray) -> None:
        """Copy what the tensors hold now."""
        row = memoryview(out)
        for place, memory, _ in self._rows:
            row[place] = memory

    def views(self, copy: bytearray) -> list[list[Tensor]]:
        """Return each tensor's part of a copy as words, for `sum_words`."""
        return [word_views(torch.frombuffer(copy[place], dtype=dtype)) for place, _, dtype in self._rows]


# ----------------------------------------------------------------------------------------------------------------------


@final
class FlipWatch:
    """Watches the weights of one rank, from the end of an update to the beginning of the next."""

    def __init__(self, params: Mapping[str, nn.Parameter], update: Optimizer, *, is_on: bool) -> None:
        self._params = {name: p for name, p in params.items() if is_on and _can_be_watched(p)}
        self._update = update
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        """Of the tensors that are summed; those that are copied come after them."""
        self._copies = Copies([])
        self._places: list[int] = []
        """Addresses of the tensors that the views are of."""
        self._before = self._now = self._found = torch.zeros(0, PARTS, dtype=torch.int64)
        self.versions: list[int] | None = None
        """Versions of the tensors when their bits were summed; None: the bits of this interval are not known."""
        self._mark: tuple[Tensor, int] | None = None
        """Sums, and that of the copies, after the last averaging that left equal weights on all ranks; None: there was none."""
        self._began = time.perf_counter()
        self.spent = 0.0
        """Seconds of this thread's own time in which bits were summed: what other processes take is not the watch's."""
        self.most_time = MOST_TIME
        self.looks = self.passed_over = 0
        """Intervals between two updates that were watched, and those that were left out to save time."""

    def forget(self) -> None:
        """Drop what was taken: a checkpoint was loaded, or the weights were written by this library."""
        self.versions = self._mark = None
        self._found.zero_()

    # --- between two updates --------------------------------------------------------------------------------------

    def take(self, *, are_equal: bool) -> None:
        """Sum the bits after an update. `are_equal`: an averaging has just left the same weights on all ranks."""
        if not self._params:
            return
        self.versions = None
        if not are_equal and self.spent > SLACK_SECONDS + self.most_time * (time.perf_counter() - self._began):
            self.passed_over += 1
            return
        start = time.thread_time()
        self._lay_out(finds_masters=are_equal or not self._tensors)
        sum_words(self._views, self._before)
        self._copies.write(self._copies.before)
        self.versions = [tensor._version for tensor in self._tensors]
        if are_equal:
            copied = int(np.frombuffer(self._copies.before, np.int64).sum())
            self._mark = self._before[: len(self._views)].clone(), copied
        self.spent += time.thread_time() - start

    def look(self) -> None:
        """Sum again before an update, and keep what has changed by itself."""
        if self.versions is None or [tensor.data_ptr() for tensor in self._tensors] != self._places:
            return
        start = time.thread_time()
        self.looks += 1
        sum_words(self._views, self._now)
        self._copies.write(self._copies.now)
        known = [tensor._version == version for tensor, version in zip(self._tensors, self.versions, strict=True)]
        self.versions = None
        if self._now.device.type != "cpu" or self._differ():
            is_known = torch.tensor(known, device=self._now.device)
            found = flipped(self._before, self._now, is_known)
            self._found = torch.where(self._found != 0, self._found, found)
        self.spent += time.thread_time() - start

    def _differ(self) -> bool:
        """Compare with what was there before; where a copy differs, sum the copies too."""
        summed = len(self._views)
        has_copy_changed = self._copies.now != self._copies.before
        if has_copy_changed:
            sum_words(self._copies.views(self._copies.before), self._before[summed:])
            sum_words(self._copies.views(self._copies.now), self._now[summed:])
        return has_copy_changed or (summed > 0 and not torch.equal(self._now[:summed], self._before[:summed]))

    def _lay_out(self, *, finds_masters: bool) -> None:
        """Find the tensors, and view their memory, unless they are where they were. Masters are made at the first update."""
        if not finds_masters and [tensor.data_ptr() for tensor in self._tensors] == self._places:
            return
        masters = {name: _master_of(self._update, param) for name, param in self._params.items()}
        named = [*self._params.items(), *((name, copy) for name, copy in masters.items() if copy is not None)]
        named.sort(key=lambda one: _is_copied(one[1]))
        places = [tensor.data_ptr() for _, tensor in named]
        if places == self._places and len(named) == len(self._tensors):
            return
        self._names, self._tensors, self._places = [name for name, _ in named], [tensor for _, tensor in named], places
        copied = [tensor for tensor in self._tensors if _is_copied(tensor)]
        self._copies = Copies(copied)
        self._views = [word_views(tensor) for tensor in self._tensors[: len(self._tensors) - len(copied)]]
        device = self._tensors[0].device
        self._before, self._now, self._found = (
            torch.zeros(len(named), PARTS, dtype=torch.int64, device=device) for _ in range(3)
        )

    # --- at an averaging --------------------------------------------------------------------------------------------

    def news(self) -> tuple[float, float]:
        """Return whether a flip was found, and the mark of the last averaging; 0.0: none. This waits for the device."""
        start = time.thread_time()
        mark = 0.0 if self._mark is None else float(mark_of(*self._mark))
        found = float(bool(self._flips()))
        self.spent += time.thread_time() - start
        return found, mark

    def _flips(self) -> list[str]:
        """Describe what was found: flips in the upper half of a number. Those below change a weight by less than a hundredth,
        and a script that writes through `.data` may by chance have done as much."""
        if not len(self._found):
            return []
        told = []
        for name, tensor, changes in zip(self._names, self._tensors, self._found.tolist(), strict=True):
            change = next(filter(None, changes), 0)
            if change and bit_of(change, tensor.element_size()) >= 4 * tensor.element_size():
                told.append(f"bit {bit_of(change, tensor.element_size())} of a number in `{name}`")
        return told

    def read_rows(self, rows: Sequence[Row], comm: Comm) -> None:
        """Raise on all ranks if one has found a flip, or if the last averaging did not leave the same on all."""
        if any(row.flips for row in rows):
            flips = comm.gather_json(self._flips())
            self._found.zero_()
            told = "; ".join(f"rank {rank}: {listed(theirs, 3)}" for rank, theirs in enumerate(flips) if theirs)
            raise FleetError(
                f"weights have changed by themselves, between two updates, where nothing writes to them: {told}. The memory of "
                f"that machine may be failing. All ranks stop at this averaging, before it spreads. {_ADVICE}"
            )
        marks = {rank: row.mark for rank, row in enumerate(rows) if row.mark}
        if len(set(marks.values())) > 1:
            raise FleetError(
                f"the averaging before this one did not leave the same weights on all ranks: unlike most, {_odd_ones(marks)}. "
                f"Something has changed them on some ranks only, or memory is failing there. {_ADVICE}"
            )


_ADVICE = "Load the last checkpoint; strategy.desync_check_steps = 0 turns this check off."


def _odd_ones(marks: Mapping[int, float]) -> str:
    """Name the ranks whose mark most others have not."""
    values: list[Any] = list(marks.values())
    usual = max(values, key=values.count)
    odd = [rank for rank, mark in marks.items() if mark != usual]
    return f"rank {odd[0]}" if len(odd) == 1 else f"ranks {odd}"


def _can_be_watched(param: Tensor) -> bool:
    plain = type(param.detach()) is Tensor and param.layout is torch.strided and param.numel() >= SMALLEST
    return plain and bool(torch.ops.aten.is_non_overlapping_and_dense(param))


def _is_copied(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes <= COPIED_BYTES


def _master_of(update: Optimizer, param: Tensor) -> Tensor | None:
    copy: Tensor | None = update.state[param].get(MASTER) if param in update.state else None
    return copy if copy is not None and _can_be_watched(copy) else None
