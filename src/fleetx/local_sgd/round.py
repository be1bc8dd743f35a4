"""One averaging under way: when it was launched, who takes part, what they have told, what is still on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dist.comm import Comm, Pending
from ..engine.rank_status import Row, rows_of


@dataclass(slots=True)
class Round:
    launched_at: int
    settle_at: int
    comm: Comm
    """All ranks, or those of this node."""
    gathered: Tensor
    """The ranks' rows, once they have come."""
    told: Pending | None
    """None: heard already."""
    pending: list[Pending]
    with_state: bool = False
    """Optimizer state is averaged too."""

    def rows(self) -> list[Row]:
        return rows_of(self.gathered)

    @property
    def trains_on(self) -> bool:
        """Whether its ranks go on training while it is under way."""
        return self.settle_at > self.launched_at

    def arrive(self) -> None:
        """Wait for all of it. What the ranks have told is heeded later, where it would have been."""
        if self.told is not None:
            self.told.wait()
            self.told = Pending(None)
        for pending in self.pending:
            pending.wait()
        self.pending = [Pending(None) for _ in self.pending]

    def state_dict(self) -> dict[str, Any]:
        """Once it has arrived."""
        heard = self.told is None
        return {"launched_at": self.launched_at, "settle_at": self.settle_at, "heard": heard, "rows": self.gathered}


def round_from(state: Mapping[str, Any], comm: Comm, pending: list[Pending]) -> Round:
    """Of a run that saved. Its requests to stop and failures are left out: it has heard of them, or was ended otherwise."""
    rows = [Row(*row)._replace(stops=0.0, failed_at=0.0, missing=0.0) for row in state["rows"].tolist()]
    gathered = torch.tensor(rows, dtype=torch.float64, device=comm.control_device)
    told = None if state["heard"] else Pending(None)
    return Round(int(state["launched_at"]), int(state["settle_at"]), comm, gathered, told, pending)
