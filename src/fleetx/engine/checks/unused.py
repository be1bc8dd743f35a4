"""Parameters without a gradient: an error that names them, or (find_unused_parameters) None where no rank used them."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from ...config.text import listed
from ...dist.comm import Comm
from ...errors import ConfigError
from ..buckets import Buckets
from ..sidecar import Alarms


def missing_gradients_message(names_by_rank: list[list[str]], *, hint: str = "") -> str:
    lines = []
    for rank, names in enumerate(names_by_rank):
        if names:
            lines.append(f"rank {rank}: {listed([f'`{name}`' for name in names], 5)}")
    missing = "; ".join(lines)
    if hint:  # the cause is known
        return f"{hint.strip()} Therefore these parameters got no gradient in this window: {missing}."
    return (
        f"these parameters got no gradient in this window: {missing}. If that is intended, write "
        "strategy.find_unused_parameters = True, or freeze them with requires_grad_(False)."
    )


@final
class UnusedCheck:
    """Agreed on all ranks: the number of missing gradients is one of the alarms that travel with the last bucket."""

    def __init__(self, buckets: Buckets, comm: Comm, *, allowed: bool) -> None:
        self.buckets, self.comm, self.allowed = buckets, comm, allowed
        self.missing: list[str] = []
        self.hint: Callable[[], str] = lambda: ""
        """A further sentence on why gradients may be missing."""

    def after_reduce(self) -> list[bool] | None:
        """Which parameters were used by any rank, in bucket order; None when all must have been."""
        if self.allowed:
            return [count > 0 for count in self.buckets.use_counts()]
        self.missing = self.buckets.missing()
        return None

    def read_alarms(self, alarms: Alarms) -> None:
        """The alarms of the window that was reduced last are known now, on every rank."""
        if not self.allowed and float(alarms.missing) > 0:
            raise ConfigError(missing_gradients_message(self.comm.gather_json(self.missing), hint=self.hint()))
