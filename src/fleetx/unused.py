"""Parameters without a gradient: an error that names them, or (find_unused_parameters) None where no rank used them."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .buckets import Buckets
from .comm import Comm
from .errors import ConfigError


def missing_gradients_message(names_by_rank: list[list[str]]) -> str:
    lines = []
    for rank, names in enumerate(names_by_rank):
        if names:
            shown = ", ".join(f"`{name}`" for name in names[:5])
            lines.append(f"rank {rank}: {shown}" + (f" and {len(names) - 5} more" if len(names) > 5 else ""))
    return (
        "these parameters got no gradient in this window: " + "; ".join(lines) + ". If that is intended, write "
        "strategy.find_unused_parameters = True, or freeze them with requires_grad_(False) before fleet.distribute(...)."
    )


@final
class UnusedCheck:
    """Agreed on all ranks: the number of missing gradients is summed in the tail of the last bucket."""

    def __init__(self, buckets: Buckets, comm: Comm, *, allowed: bool) -> None:
        self.buckets, self.comm, self.allowed = buckets, comm, allowed
        self._unread: list[str] | None = None
        """This rank's missing gradients in a window whose alarm has not been read yet."""
        self._alarm: Tensor | None = None
        self._alarm_copied: torch.cuda.Event | None = None

    def before_reduce(self) -> None:
        """Read the alarm of the window before, on devices where reading at once would stall the step."""
        if self._unread is not None and self._alarm is not None and self._alarm_copied is not None:
            self._alarm_copied.synchronize()  # of the update before: long done
            self._raise_if_any(self._unread, self._alarm)

    def after_reduce(self, *, first: bool) -> list[bool] | None:
        """Which parameters were used by any rank, in bucket order; None when all must have been."""
        tail = self.buckets.tail
        if self.allowed:
            if tail is None:
                return self.buckets.filled()
            return [count > 0 for count in self.buckets.tail_sums()[1 : 1 + tail.flags].tolist()]
        missing = self.buckets.missing()
        if tail is None:
            if missing:
                raise ConfigError(missing_gradients_message([missing]))
        elif first or self.buckets.tail_sums().device.type == "cpu":
            self._raise_if_any(missing, self.buckets.tail_sums()[:1])
        else:
            # The sums are on the device: reading them now would wait for it. All ranks go on with the same
            # gradients (missing ones count as zero) and all raise together, one update later.
            self._unread = missing
            self._copy_alarm()
        return None

    def _copy_alarm(self) -> None:
        """Send the alarm to the host behind the reduce, without waiting."""
        sums = self.buckets.tail_sums()
        if self._alarm is None:
            self._alarm = torch.zeros(1, dtype=sums.dtype, pin_memory=True)
        self._alarm.copy_(sums[:1], non_blocking=True)
        self._alarm_copied = torch.cuda.Event()
        self._alarm_copied.record()

    def _raise_if_any(self, missing: list[str], alarm: Tensor) -> None:
        self._unread = None
        if float(alarm) > 0:
            raise ConfigError(missing_gradients_message(self.comm.gather_json(missing)))
