"""What went wrong on a rank that trains alone, kept until the ranks meet: then all of them raise, or none.

One rank that raised by itself would leave the others waiting in the next averaging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from ...dist.comm import Comm
from ...errors import ConfigError, FleetError
from ..rank_status import Row
from .unused import missing_gradients_message


@final
@dataclass(slots=True)
class DeferredErrors:
    failed_at: int = 0
    """The first update that was not made, though the strategy says stop; 0: none."""
    why: str = ""
    missing: list[str] = field(default_factory=list)
    """Parameters that got no gradient and should have."""

    def note_failure(self, step: int, why: str) -> None:
        if not self.failed_at:
            self.failed_at, self.why = step, why

    def note_missing(self, names: Sequence[str]) -> None:
        self.missing = self.missing or list(names)

    def forget(self) -> None:
        self.failed_at, self.why, self.missing = 0, "", []

    def read_rows(self, rows: Sequence[Row], comm: Comm) -> None:
        """Every rank is here with the same rows, and so all of them gather, or none does.

        A checkpoint holds nothing of this: the run that saved it has heard, or was ended otherwise."""
        missing, why = self.missing, self.why
        if rows[comm.rank].missing or rows[comm.rank].failed_at:
            self.forget()  # every rank knows of it now; what happened after the rows were sent is reported in the next round
        if any(row.missing for row in rows):
            raise ConfigError(missing_gradients_message(comm.gather_json(missing)))
        if any(row.failed_at for row in rows):
            whys = comm.gather_json(why)
            told = [f"update {int(row.failed_at)} of rank {r}: {whys[r]}" for r, row in enumerate(rows) if row.failed_at]
            raise FleetError(
                f"a loss or gradient was not finite while each rank trained alone, and these updates were not made: "
                f"{'; '.join(told)}. All ranks stop at this averaging, before it changes a weight. Look at the data and the "
                'learning rate; strategy.on_nan_inf = "skip" leaves such updates out, "off" lets them pass.'
            )
