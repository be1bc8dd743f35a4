"""Read what the ranks have told each other with the gradients: at once where that is free, else one update later.

On a CPU the sums are simply there. On a GPU reading them waits for the device, so they are copied to the host behind the
reduce, and read when the next backward begins: on every rank at the same place, and no rank has waited. Whether the gradients
are finite is decided on the device meanwhile, and the update is made by that (conditional_step.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from ..buckets import Buckets
from ..sidecar import ALARMS, Alarms

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
    """Whether reading a number of this device would wait for it."""
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
        """The answer; waits for the device where it is not known."""
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
        """`may_miss`: parameters without a gradient are no error."""
        self._buckets, self._may_miss = buckets, may_miss
        self._device = next(iter(buckets)).flat.device
        self._host: Tensor | None = None
        self._last: HostCopy | None = None
        """Of the window sent last."""
        self._unread: HostCopy | None = None
        """The same, while its alarms were not acted on."""

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
        """Those of the window just reduced, and the gradients' norm. On a GPU this waits for the reduce, once for both."""
        self._unread = None
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
        self._unread = self._copy(sums, None)

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
        self._unread = self._copy(sums, found)
        return Verdict(None, found=found, copy=self._unread)

    def _copy(self, sums: Tensor | None, last: Tensor | None) -> HostCopy:
        """To the host, in one row: the alarms, and one number more."""
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
        """A checkpoint was loaded: what was sent is of a window before."""
        self._unread = None

    def sent_before(self) -> Alarms | None:
        """Those sent last, if they have not been acted on yet."""
        unread, self._unread = self._unread, None
        return None if unread is None else Alarms(*unread.numbers()[:ALARMS])


def _zero_if_finite(norm: Tensor) -> Tensor:
    """0, or NaN."""
    return norm - norm
