"""Reading the alarms that travelled with the gradients: at once where that is free, else one update later.

On a CPU the sums are simply there. On a GPU reading them waits for the device, so they are copied to the host behind the
reduce, and read when the next window is about to be reduced: on every rank at the same place, and nobody has waited.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ..buckets import Buckets
from ..sidecar import ALARMS, Alarms


@final
class AlarmReader:
    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def is_free(self) -> bool:
        """Whether reading at once costs nothing: the sums are on the CPU, or there is nobody to sum with."""
        sums = self._buckets.alarm_sums()
        return sums is None or sums.device.type == "cpu"

    def read(self, norm: Tensor | None) -> tuple[Alarms, float | None]:
        """Those of the window just reduced, and the gradients' norm. On a GPU this waits for the reduce, once for both."""
        self._arrived = None
        sums = self._buckets.alarm_sums()
        if sums is not None and norm is not None and sums.device.type == "cuda":
            host = self._to_host(sums, norm)
            torch.cuda.current_stream(sums.device).synchronize()
            *alarms, value = host.tolist()
            return Alarms(*alarms), value
        if sums is not None:
            return Alarms(*sums.tolist()), None if norm is None else float(norm)
        own = self._buckets.own_alarms()
        if norm is not None and isinstance(own.bad_losses, Tensor):  # 0 or NaN on the device: one number, one wait
            norm, own = norm + own.bad_losses, own._replace(bad_losses=0.0)
        return own, None if norm is None else float(norm)

    def _to_host(self, sums: Tensor, norm: Tensor | None) -> Tensor:
        if self._host is None:
            self._host = torch.zeros(ALARMS + 1, dtype=torch.float64, device="cpu", pin_memory=True)
        self._host[:ALARMS].copy_(sums, non_blocking=True)
        if norm is not None:
            self._host[ALARMS].copy_(norm, non_blocking=True)
        return self._host

    def send(self) -> None:
        """Copy them to the host, without waiting."""
        sums = self._buckets.alarm_sums()
        assert sums is not None
        self._to_host(sums, None)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def forget(self) -> None:
        """A checkpoint was loaded: what was sent is of a window before."""
        self._arrived = None

    def sent_before(self) -> Alarms | None:
        """Those sent last, if they have not been read yet."""
        if self._arrived is None or self._host is None:
            return None
        self._arrived.synchronize()  # of the update before: long done
        self._arrived = None
        return Alarms(*self._host[:ALARMS].tolist())
