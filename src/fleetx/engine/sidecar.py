"""What travels with the gradients so that ranks stay equal: buffers, and a few flags, in the tail of the last bucket.

Layout, in floats: [alarms][one flag per parameter, if asked][floating buffers][integer buffers, a byte each].
Alarms are counts that all ranks must act on together: see `Alarms`.
Floating buffers (BatchNorm statistics) are averaged; integers come from rank 0, since all others send zeros.
Large tables have no place here, the layout being fixed: an alarm brings the ranks together once one has changed (tables.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from ..dist.comm import Comm
from .buffer_kinds import apply_change, average_of_change, buffer_of, reshaped, sort_buffers
from .large_buffers import Tables
from .unequal_buffers import UnequalBuffers, is_unequal, warn_of_unequal


class Alarms(NamedTuple):
    """On one rank what it has to tell; summed over ranks, what all of them know."""

    missing: float | Tensor = 0.0
    """Parameters without a gradient in this window."""
    bad_losses: float | Tensor = 0.0
    """0 where all losses of this window are finite; else a number of them, or NaN."""
    stops: float | Tensor = 0.0
    """Requests to stop at an update boundary."""
    place: float | Tensor = 0.0
    """A number of the update and the backward under way; with the sum of squares it tells whether all ranks have the same."""
    place_squared: float | Tensor = 0.0
    changed_tables: float | Tensor = 0.0
    """Large buffers that were written to since the ranks last had the same."""
    unequal_buffers: float | Tensor = 0.0
    """Buffers outside norm layers whose common value, after the last update, was not this rank's own. Not reported yet."""


ALARMS = len(Alarms._fields)
NO_ALARMS = Alarms()


@final
class Tail:
    def __init__(self, model: nn.Module, *, rank: int, size: int, flags: int, local: Collection[str] = ()) -> None:
        """`local`: names or patterns of buffers that belong to each rank."""
        self.rank, self.size, self.flags = rank, size, flags
        buffers = sort_buffers(model, local)
        self.local = set(buffers.local)
        self._names, self._owners = list(buffers.floats), list(buffers.floats.values())
        self._integer_names, self._integers = list(buffers.integers), list(buffers.integers.values())
        floats = [buffer_of(o) for o in self._owners]
        self.dtype = torch.float64 if any(b.dtype == torch.float64 for b in floats) else torch.float32
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.tables = Tables(buffers, device)
        self._unequal = UnequalBuffers(buffers)
        self._last, self._last_views = _flat_views(floats, self.dtype, device)
        self._now, self._now_views = _flat_views(floats, self.dtype, device)
        self._bytes, self._byte_views = _byte_views([buffer_of(o) for o in self._integers], device)
        if floats:
            torch._foreach_copy_(self._last_views, floats)
        self.numel = ALARMS + flags + self._last.numel() + self._bytes.numel()

    @torch.no_grad()
    def pack(self, out: Tensor, *, alarms: Alarms, used: list[bool] | None) -> None:
        """Write this rank's share; `out` is then summed over ranks."""
        own = alarms._replace(changed_tables=len(self.tables.changed()), unequal_buffers=self._unequal.count())
        _write_alarms(out, own)
        start = ALARMS + self.flags
        if used is not None:
            out[ALARMS:start] = torch.tensor(used, dtype=out.dtype)
        if self._owners:
            self._collect_floats()
            out[start : start + self._now.numel()] = average_of_change(self._now, self._last, self.size)
        if self._integers:
            integers = out[start + self._now.numel() :]
            if self.rank == 0:
                torch._foreach_copy_(self._byte_views, [buffer_of(o) for o in self._integers])
                integers.copy_(self._bytes)
            else:
                integers.zero_()

    def _collect_floats(self) -> None:
        buffers = [buffer_of(o) for o in self._owners]
        try:
            torch._foreach_copy_(self._now_views, buffers)
        except RuntimeError:
            for name, buffer, view in zip(self._names, buffers, self._now_views, strict=True):
                if buffer.shape != view.shape:
                    raise reshaped(name, buffer.shape, view.shape) from None
            raise

    @torch.no_grad()
    def unpack(self, out: Tensor) -> None:
        """Give every rank the same buffers; `out` is the sum over ranks."""
        start = ALARMS + self.flags
        written = self._unequal.candidates()
        if self._owners:
            buffers = [buffer_of(o) for o in self._owners]
            common = apply_change(self._last, out[start : start + self._last.numel()])
            self._note_unequal_floats(common, written)
            self._last.copy_(common)
            torch._foreach_copy_(buffers, self._last_views)
            if any(b.dtype != self.dtype for b in buffers):
                torch._foreach_copy_(self._last_views, buffers)  # a 16-bit buffer rounds: remember what it really holds
        if self._integers:
            integers = [buffer_of(o) for o in self._integers]
            self._bytes.copy_(out[start + self._now.numel() :])
            for name, buffer, first in zip(self._integer_names, integers, self._byte_views, strict=True):
                if name in written:
                    self._unequal.note(name, (buffer != first).any())
            torch._foreach_copy_(integers, self._byte_views)
        self._unequal.renew_marks()

    def _note_unequal_floats(self, common: Tensor, written: Collection[str]) -> None:
        if not written:
            return
        commons = common.split([view.numel() for view in self._now_views])
        for name, now, last, new in zip(self._names, self._now_views, self._last_views, commons, strict=True):
            if name in written:
                self._unequal.note(name, is_unequal(now, last, new.view(now.shape), self.size))

    def read_alarms(self, alarms: Alarms, comm: Comm) -> None:
        """Every rank has the same sums, and does the same."""
        unequal = self.tables.make_equal(comm) if alarms.changed_tables > 0 else set()
        unequal |= self._unequal.gather(comm) if alarms.unequal_buffers > 0 else set()
        if comm.rank == 0:  # after the last collective: a warning may have been made an error
            warn_of_unequal(unequal)
            self.tables.warn_of_let_go()

    def written(self) -> set[str]:
        """Buffers that this rank has written to since they were made equal: by the next update they are again."""
        return self._unequal.written() | set(self.tables.changed())

    def common(self) -> dict[str, Tensor]:
        """The floating buffers as they were, on every rank, after the last update."""
        return dict(zip(self._names, self._last_views, strict=True))

    @torch.no_grad()
    def renew(self) -> None:
        """Continue from what the buffers hold now, the same on all ranks."""
        if self._owners:
            torch._foreach_copy_(self._last_views, [buffer_of(o) for o in self._owners])
        self._unequal.renew_marks()

    @torch.no_grad()
    def renew_where(self, found: Tensor, *, but: Collection[str]) -> None:
        """The same on the device, where `found` is not 0. Buffers were written to for that, which is no change by the training;
        those in `but` were changed before."""
        if self._owners:
            torch._foreach_copy_(self._now_views, [buffer_of(o) for o in self._owners])
            torch.where(found != 0.0, self._now, self._last, out=self._last)
        self._unequal.renew_marks(but=but)

    @torch.no_grad()
    def resume(self, common: Mapping[str, Tensor] | None) -> None:
        """A checkpoint was loaded, which is no change by the training. None: it holds no `common`."""
        self.renew()
        for name, view in zip(self._names, self._last_views, strict=True):
            if common is not None and name in common:
                view.copy_(common[name])
        self.tables.resume(())


def _write_alarms(out: Tensor, alarms: Alarms) -> None:
    if out.device.type == "cpu" and not any(isinstance(alarm, Tensor) for alarm in alarms):
        out[:ALARMS] = torch.tensor(alarms, dtype=out.dtype)
        return
    out[:ALARMS].zero_()
    for place, alarm in enumerate(alarms):
        if isinstance(alarm, Tensor) or alarm:  # each write is a kernel, and most have nothing to tell
            out[place] = alarm


def _flat_views(like: list[Tensor], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    flat = torch.zeros(sum(t.numel() for t in like), dtype=dtype, device=device)
    views = [piece.view(t.shape) for piece, t in zip(flat.split([t.numel() for t in like]), like, strict=True)] if like else []
    return flat, views


def _byte_views(like: list[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """One flat byte buffer, and a view of each tensor's own type into it."""
    lengths = [-(-t.nbytes // 8) * 8 for t in like]  # 8-byte steps: a view as int64 must be aligned
    flat = torch.zeros(sum(lengths), dtype=torch.uint8, device=device)
    views, start = [], 0
    for t, length in zip(like, lengths, strict=True):
        views.append(flat[start : start + t.nbytes].view(t.dtype).view(t.shape))
        start += length
    return flat, views
