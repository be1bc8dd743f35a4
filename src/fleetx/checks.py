"""What looks over a step's shoulder. Alarms travel with the gradients, are read on all ranks alike, and heeded by everybody."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from . import stopping
from .alarms import AlarmReader
from .averaging.told import Row
from .comm import Comm
from .errors import FleetError
from .first_look import FirstLook
from .guards import NonFiniteGuard, RankCheck
from .slots import Backward
from .tail import Alarms
from .unheard import Unheard
from .unused import UnusedCheck
from .window import Window


@final
@dataclass(slots=True)
class Checks:
    unused: UnusedCheck
    first_look: FirstLook | None
    """Once."""
    finite: NonFiniteGuard
    ranks: RankCheck
    alarms: AlarmReader
    unheard: Unheard
    comm: Comm

    def before_reduce(self, window: Window) -> None:
        """Act on alarms read late; and once, before the first reduce: all ranks weigh or none, and each has its own data."""
        late = self.alarms.sent_before()
        if late is not None:
            self._heed(late)
        if self.first_look is not None:
            look, self.first_look = self.first_look, None
            look.finish(self.comm, loss=window.losses[0] if window.losses else None, weighted=bool(window.weights))

    def alarms_of(self, window: Window) -> Alarms:
        bad_losses = 0.0 if self.finite.mode == "off" else window.count_bad_losses()
        return Alarms(bad_losses=bad_losses, stops=float(stopping.is_requested()))

    def looks_at_norm(self, backward: Backward) -> bool:
        return backward.checks_finite or self.finite.mode != "off"

    def judge(self, norm: Tensor | None, *, first: bool) -> bool:
        """Whether the window just reduced may update: equal gradients and equal sums give every rank the same answer.

        `norm`: of the gradients, where somebody looks at it; without it the alarms are read when that is free."""
        finite = True
        if norm is not None or self.alarms.is_free() or first or self.ranks.tables_change:
            alarms, value = self.alarms.read(norm)
            finite = value is None or (math.isfinite(value) and not self._losses_are_bad(alarms))
            self._heed(alarms)
        else:
            self.alarms.send()
            self.ranks.hears_later()
        return finite

    def judge_alone(self, norm: Tensor | None) -> bool:
        """The same of a window that was not reduced: what all ranks must act on is kept until they meet."""
        alarms, value = self.alarms.read(norm)
        if not self.unused.allowed and alarms.missing:
            self.unheard.note_missing(self.unused.missing)
        return value is None or (math.isfinite(value) and not self._losses_are_bad(alarms))

    def heed_round(self, rows: Sequence[Row]) -> None:
        """The ranks have met: everybody knows what each had to tell, and does the same."""
        stopping.heed(agreed=any(row.stops for row in rows))
        self.unheard.heed(rows, self.comm)

    def after_round(self, index: int, *, equal: bool) -> None:
        """Weights and buffers are an average. `equal`: the same on all ranks."""
        self.finite.remember()
        if equal:
            self.ranks.after_round(index)

    def stop(self, step: int, losses: list[Tensor], *, alone: bool) -> None:
        """Now, or, since the others know of nothing, when the ranks meet."""
        if not alone:
            self.finite.refuse(step, losses)
        told = ", ".join(repr(float(loss)) for loss in losses) or "not seen"
        self.unheard.note_failure(step, f"losses {told}; gradients: {self.finite.bad_gradients()}")

    def must_stop(self, backward: Backward) -> bool:
        """An overflow is what a loss scale expects, while it can shrink; elsewhere it is an accident."""
        return self.finite.mode == "stop" and not backward.expects_overflow()

    def agree_to_flush(self, window: Window) -> None:
        """A rank whose window is empty would leave the others waiting in the reduce: asked here, where every rank is."""
        counts = self.comm.gather_json(window.micro_steps) if self.comm.size > 1 else []
        if any(counts) and not all(counts):
            raise FleetError(
                f"optimizer.flush() found {counts} micro-batches in the ranks' windows; one with none has nothing to reduce. "
                "Give every rank equally many batches: fleet.sampler(data) does."
            )

    def forget(self) -> None:
        """A checkpoint was loaded: what is under way is of the weights before."""
        self.alarms.forget()
        self.ranks.forget()
        self.unheard.forget()

    def _heed(self, alarms: Alarms) -> None:
        """Every rank has the same sums, and does the same."""
        stopping.heed(agreed=bool(alarms.stops > 0))
        self.unused.heed(alarms)
        self.ranks.heed(alarms)

    def _losses_are_bad(self, alarms: Alarms) -> bool:
        return self.finite.mode != "off" and not alarms.bad_losses == 0
