"""Parameters without a gradient: an error that names them, or (find_unused_parameters) None where no rank used them."""

from __future__ import annotations

from typing import final

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

    def before_reduce(self) -> None:
        """Read the alarm of the window before, on devices where reading at once would stall the step."""
        if self._unread is not None:
            self._raise_if_any(self._unread)

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
            self._raise_if_any(missing)
        else:
            # The sums are on the device: reading them now would wait for it. All ranks go on with the same
            # gradients (missing ones count as zero) and all raise together, one update later.
            self._unread = missing
        return None

    def _raise_if_any(self, missing: list[str]) -> None:
        self._unread = None
        if float(self.buckets.tail_sums()[0]) > 0:
            raise ConfigError(missing_gradients_message(self.comm.gather_json(missing)))
