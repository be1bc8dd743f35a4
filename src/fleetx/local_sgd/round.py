"""One round under way: when it was launched, which ranks take part, their rows, and what is still on the wire."""

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
    """A round from its launch until it is settled."""

    launched_at: int
    """Index of the update after which it was launched."""
    settle_at: int
    """Index of the update after which it is settled."""
    comm: Comm
    """All ranks, or those of this node."""
    gathered: Tensor
    """The ranks' rows, once they have arrived."""
    rows_pending: Pending | None
    """The collective that gathers the rows; None once they were acted on."""
    pending: list[Pending]
    """The collectives of what is averaged."""
    with_state: bool = False
    """Whether optimizer state is averaged too."""
    fragment: int | None = None
    """The part of the model that is averaged; None: all of it."""
    relay_at: int = 0
    """Index of the update after which a second exchange is started, where what is sent needs one; 0: it was."""

    def rows(self) -> list[Row]:
        return rows_of(self.gathered)

    @property
    def trains_on(self) -> bool:
        """Whether its ranks go on training while it is under way."""
        return self.settle_at > self.launched_at

    def arrive(self) -> None:
        """Wait for all collectives so far. The rows are acted on later, when the round is settled."""
        if self.rows_pending is not None:
            self.rows_pending.wait()
            self.rows_pending = Pending(None)
        for pending in self.pending:
            pending.wait()
        self.pending = [Pending(None) for _ in self.pending]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a round that has arrived."""
        heard = self.rows_pending is None
        known = {"launched_at": self.launched_at, "settle_at": self.settle_at, "heard": heard, "rows": self.gathered}
        return known | {"fragment": self.fragment, "relay_at": self.relay_at}


def round_from(state: Mapping[str, Any], comm: Comm) -> Round:
    """Rebuild a saved round, without its requests to stop and its errors: the run that saved has acted on them, or ended."""
    rows = [Row(*row)._replace(stops=0.0, failed_at=0.0, missing=0.0, flips=0.0, mark=0.0) for row in state["rows"].tolist()]
    gathered = torch.tensor(rows, dtype=torch.float64, device=comm.control_device)
    rows_pending = None if state["heard"] else Pending(None)
    under_way = Round(int(state["launched_at"]), int(state["settle_at"]), comm, gathered, rows_pending, [])
    under_way.fragment, under_way.relay_at = state.get("fragment"), int(state.get("relay_at", 0))
    return under_way
