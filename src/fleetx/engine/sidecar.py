"""What travels with the gradients so that ranks stay equal: buffers, and a few flags, in the tail of the last bucket.

Layout, in floats: [alarms][one flag per parameter, if asked][floating buffers][integer buffers, a byte each].
Alarms are counts that all ranks must act on together: see `Alarms`.
Floating buffers (BatchNorm statistics) are averaged; integers come from rank 0, since all others send zeros.
Large tables have no place here, the layout being fixed: an alarm brings the ranks together once one has changed (tables.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor, nn

from ..dist.comm import Comm
from .buffers.buffer_kinds import apply_change, average_of_change, buffer_of, reshaped, sort_buffers
from .buffers.large_buffers import Tables
from .buffers.unequal_buffers import UnequalBuffers, is_unequal, warn_of_unequal

if TYPE_CHECKING:
    from .buckets import Buckets


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
        """Lay out what travels beside the gradients. `local`: names or patterns of buffers that belong to each rank."""
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
        if self.tables.owners:
            alarms = alarms._replace(changed_tables=len(self.tables.changed()))
        if self._unequal.owners:
            alarms = alarms._replace(unequal_buffers=self._unequal.count())
        _write_alarms(out, alarms)
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
        written = self._unequal.candidates() if self._unequal.owners else set()
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
        if self._unequal.owners:
            self._unequal.renew_marks()

    def _note_unequal_floats(self, common: Tensor, written: Collection[str]) -> None:
        if not written:
            return
        commons = common.split([view.numel() for view in self._now_views])
        for name, now, last, new in zip(self._names, self._now_views, self._last_views, commons, strict=True):
            if name in written:
                self._unequal.note(name, is_unequal(now, last, new.view(now.shape), self.size))

    def read_alarms(self, alarms: Alarms, comm: Comm) -> None:
        """Act on the summed alarms. Every rank has the same sums, and does the same."""
        unequal = self.tables.make_equal(comm) if alarms.changed_tables > 0 else set()
        unequal |= self._unequal.gather(comm) if alarms.unequal_buffers > 0 else set()
        if comm.rank == 0:  # after the last collective: a warning may have been made an error
            warn_of_unequal(unequal)
            self.tables.warn_of_let_go()

    def written(self) -> set[str]:
        """Buffers that this rank has written to since they were made equal: by the next update they are again."""
        return self._unequal.written() | set(self.tables.changed())

    def common(self) -> dict[str, Tensor]:
        """Return the floating buffers as they were, on every rank, after the last update."""
        return dict(zip(self._names, self._last_views, strict=True))

    @torch.no_grad()
    def renew(self) -> None:
        """Continue from what the buffers hold now, the same on all ranks."""
        if self._owners:
            torch._foreach_copy_(self._last_views, [buffer_of(o) for o in self._owners])
        self._unequal.renew_marks()

    @torch.no_grad()
    def renew_where(self, found: Tensor, *, but: Collection[str]) -> None:
        """Renew on the device, where `found` is not 0. Buffers were written to for that, which is no change by the training;
        those in `but` were changed before."""
        if self._owners:
            torch._foreach_copy_(self._now_views, [buffer_of(o) for o in self._owners])
            torch.where(found != 0.0, self._now, self._last, out=self._last)
        self._unequal.renew_marks(but=but)

    @torch.no_grad()
    def resume(self, common: Mapping[str, Tensor] | None) -> None:
        """Take the loaded buffers as unchanged by the training. `common`: their common values; None where the checkpoint has
        none."""
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
    """Allocate one flat byte buffer, and view each tensor's own type into it."""
    lengths = [-(-t.nbytes // 8) * 8 for t in like]  # 8-byte steps: a view as int64 must be aligned
    flat = torch.zeros(sum(lengths), dtype=torch.uint8, device=device)
    views, start = [], 0
    for t, length in zip(like, lengths, strict=True):
        views.append(flat[start : start + t.nbytes].view(t.dtype).view(t.shape))
        start += length
    return flat, views


# --- Read what the ranks have told each other with the gradients: at once where that is free, else one update later ---
# On a CPU the sums are simply there. On a GPU reading them waits for the device, so they are copied to the host behind the
# reduce, and read when the next backward begins: on every rank at the same place, and no rank has waited. Whether the gradients
# are finite is decided on the device meanwhile, and the update is made by that (conditional_step.py).


_deferred: bool | None = None
"""Whether decisions stay on the device, in place of what the device's type says; None: it says."""


@contextlib.contextmanager
def deferring(deferred: bool = True) -> Iterator[None]:
    """Read late, or at once, on any device: a CPU takes the way of a GPU in tests."""
    global _deferred
    before, _deferred = _deferred, deferred
    try:
        yield
    finally:
        _deferred = before


def reads_late(device: torch.device) -> bool:
    """Return whether reading a number of this device would wait for it."""
    return device.type == "cuda" if _deferred is None else _deferred


@final
class Verdict:
    """Whether the gradients just reduced are finite on all ranks: on the device now, on the host once it is asked for."""

    def __init__(self, finite: bool | None, *, found: Tensor | None = None, copy: HostCopy | None = None) -> None:
        self._finite, self._found, self._copy = finite, found, copy

    @property
    def is_known(self) -> bool:
        """Whether asking needs no wait that the host has not had already."""
        return self._finite is not None

    @property
    def has_arrived(self) -> bool:
        return self._finite is not None or (self._copy is not None and self._copy.has_arrived)

    @property
    def found(self) -> Tensor:
        """1.0 on the device where something is not finite, else 0.0: the form that torch's fused optimizers take."""
        assert self._found is not None
        return self._found

    def is_finite(self) -> bool:
        """Return the answer; waits for the device where it is not known."""
        if self._finite is None:
            assert self._copy is not None
            self._finite = self._copy.numbers()[ALARMS] == 0.0
        return self._finite


@final
class HostCopy:
    """Numbers on their way to the host, behind all work that was given to the device before."""

    def __init__(self, row: Tensor, out: Tensor) -> None:
        self._out, self._numbers = out, None if row.device.type == "cuda" else row
        self._arrived: torch.cuda.Event | None = None
        self._read: list[float] | None = None
        if row.device.type == "cuda":
            out.copy_(row, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())

    def numbers(self) -> list[float]:
        """Wait for them, once: the memory they arrive in is used again by the next copy."""
        if self._read is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._read = (self._out if self._numbers is None else self._numbers).tolist()
        return self._read


@final
class AlarmReader:
    def __init__(self, buckets: Buckets, *, may_miss: bool) -> None:
        """Prepare to read the alarms. `may_miss`: parameters without a gradient are no error."""
        self._buckets, self._may_miss = buckets, may_miss
        self._device = next(iter(buckets)).flat.device
        self._host: Tensor | None = None
        self._last: HostCopy | None = None
        """Alarms of the window sent last."""
        self.unread: HostCopy | None = None
        """Alarms of the window sent last, until they are acted on; then None."""

    @property
    def reads_late(self) -> bool:
        return reads_late(self._device)

    @property
    def stays_on(self) -> torch.device | None:
        """The device that the host does not read from in an update; None where it may."""
        return self._device if self.reads_late else None

    @property
    def travel(self) -> bool:
        """Whether they are sums over ranks; else this rank's own, which it knows."""
        return self._buckets.alarm_sums() is not None

    def own(self) -> Alarms:
        return self._buckets.own_alarms()

    def read(self, norm: Tensor | None) -> tuple[Alarms, float | None]:
        """Return the alarms of the window just reduced, and the gradients' norm. On a GPU this waits for the reduce, once for
        both."""
        self.unread = None
        sums = self._buckets.alarm_sums()
        if sums is not None and sums.device.type == "cuda":
            *alarms, value = self._copy(sums, norm).numbers()
            return Alarms(*alarms), None if norm is None else value
        if sums is not None:
            return Alarms(*sums.tolist()), None if norm is None else float(norm)
        own = self._buckets.own_alarms()
        if norm is not None and isinstance(own.bad_losses, Tensor):  # 0 or NaN on the device: one number, one wait
            norm, own = norm + own.bad_losses, own._replace(bad_losses=0.0)
        return own, None if norm is None else float(norm)

    def send(self) -> None:
        """Copy them to the host, without waiting."""
        sums = self._buckets.alarm_sums()
        assert sums is not None
        self.unread = self._copy(sums, None)

    def send_with_verdict(self, norm: Tensor) -> Verdict:
        """Decide on the device whether the update is made, and copy that to the host, with the alarms of all ranks.

        Not made is also one for which the alarms are an error on all ranks, once they are read: weights are then as before."""
        sums = self._buckets.alarm_sums()
        if sums is None:
            total = _zero_if_finite(norm) + self._buckets.own_alarms().bad_losses
            found = (total != 0.0).float()
            return Verdict(None, found=found, copy=self._copy(None, found))
        known = Alarms(*sums.double().unbind())
        total = _zero_if_finite(norm).double()
        assert isinstance(known.place, Tensor) and isinstance(known.place_squared, Tensor)
        # 0 where all ranks have the same number, and else below it (Cauchy and Schwarz): no term makes up for another.
        total = total - torch.sub(known.place.square(), known.place_squared, alpha=self._buckets.comm.size)
        total = total + known.bad_losses
        if not self._may_miss:
            total = total + known.missing
        found = (total != 0.0).float()
        self.unread = self._copy(sums, found)
        return Verdict(None, found=found, copy=self.unread)

    def _copy(self, sums: Tensor | None, last: Tensor | None) -> HostCopy:
        """Copy the alarms and one number more to the host, in one row."""
        if self._last is not None:
            self._last.numbers()  # it arrives in the same memory; as a rule it was read long ago
        device = sums.device if sums is not None else self._device
        row = torch.zeros(ALARMS + 1, dtype=torch.float64, device=device)
        if sums is not None:
            row[:ALARMS].copy_(sums)
        if last is not None:
            row[ALARMS].copy_(last)
        if self._host is None:
            on_gpu = device.type == "cuda"
            self._host = torch.zeros(ALARMS + 1, dtype=torch.float64, device="cpu", pin_memory=on_gpu)
        self._last = HostCopy(row, self._host)
        return self._last

    def forget(self) -> None:
        """Drop what was sent: a checkpoint was loaded, and it is of a window before."""
        self.unread = None

    def sent_before(self) -> Alarms | None:
        """Return the alarms sent last, if they have not been acted on yet."""
        unread, self.unread = self.unread, None
        return None if unread is None else Alarms(*unread.numbers()[:ALARMS])


def _zero_if_finite(norm: Tensor) -> Tensor:
    """Return 0 for a finite norm, else NaN."""
    return norm - norm
