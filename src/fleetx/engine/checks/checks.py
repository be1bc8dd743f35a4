"""Per-step checks. Flags travel with the gradients and are summed with them, so that all ranks react alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from ...dist import heartbeat, stop_signal
from ...dist.comm import Comm
from ...errors import FleetError
from ..buckets import Buckets
from ..rank_status import Row
from ..sidecar import ALARMS, Alarms
from ..slots import Backward
from ..window import Window
from .deferred import DeferredErrors
from .desync import RankCheck
from .first_batch import FirstLook
from .flips import FlipWatch
from .half_sent import HalfSent
from .nonfinite import NonFiniteGuard
from .unused import UnusedCheck

# --- Reading the alarms that travelled with the gradients: at once where that is free, else one update later ----------
# On a CPU the sums are simply there. On a GPU reading them waits for the device, so they are copied to the host behind the
# reduce, and read when the next window is about to be reduced: on every rank at the same place, and no rank has waited.


@final
class AlarmReader:
    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def is_free(self) -> bool:
        """Whether reading at once costs nothing: the sums are on the CPU, or there is no other rank to sum with."""
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


# ----------------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a rank is when it reduces: the same on all ranks, or they reduce different things together."""

    update: int
    reduce: int
    dropped: int = 0
    """Updates whose gradients were reduced and then thrown away by zero_grad()."""

    def number(self) -> float:
        """A small number that differs between neighbours: its square, summed over thousands of ranks, is exact in float32."""
        return float((31 * self.update + 7 * self.reduce + 17 * self.dropped) % 61)

    def __str__(self) -> str:
        dropped = f", {self.dropped} dropped by zero_grad() so far" if self.dropped else ""
        return f"backward {self.reduce} of update {self.update}{dropped}"


def are_equal(total: float | Tensor, squares: float | Tensor, count: int) -> bool:
    """Whether `count` numbers with this sum and sum of squares are all the same (Cauchy and Schwarz)."""
    return float(total) ** 2 == count * float(squares)


@final
@dataclass(slots=True)
class Checks:
    unused: UnusedCheck
    first_look: FirstLook | None
    """Once."""
    finite: NonFiniteGuard
    ranks: RankCheck
    alarms: AlarmReader
    deferred_errors: DeferredErrors
    half_sent: HalfSent
    flips: FlipWatch
    comm: Comm
    deferred: Alarms | None = None
    """Missing gradients of a window that was reduced by a bare backward: an error in step(), if no other backward fills them."""
    deferred_alone: bool = False
    """The same of a rank that trains alone."""
    place: Place | None = None
    """Of the last reduce."""

    def before_reduce(self, window: Window, *, again: bool = False) -> None:
        """Act on alarms read late; and once, before the first reduce: all ranks weigh or none, and each has its own data.

        `again`: the window was reduced before, and its alarms are sent once more."""
        self.half_sent.refuse()
        self.deferred, self.deferred_alone = None, False
        if again:
            self.alarms.forget()
        late = self.alarms.sent_before()
        if late is not None:
            self._read_alarms(late)
        if self.first_look is not None:
            look, self.first_look = self.first_look, None
            look.finish(self.comm, loss=window.losses[0] if window.losses else None, weighted=bool(window.weights))

    def before_update(self) -> None:
        """Raise what a bare backward has left open: every rank is in step(), with the same sums."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            self.unused.read_alarms(deferred)
        if self.deferred_alone:
            self.deferred_alone = False
            self.deferred_errors.note_missing(self.unused.missing)

    def alarms_of(self, window: Window, index: int, dropped: int) -> Alarms:
        bad_losses = 0.0 if self.finite.mode == "off" else window.count_bad_losses()
        self.place = Place(index + 1, window.reduces, dropped)
        heartbeat.at_reduce(self.place)
        number = self.place.number()
        return Alarms(bad_losses=bad_losses, stops=float(stop_signal.is_requested()), place=number, place_squared=number * number)

    def looks_at_norm(self, backward: Backward) -> bool:
        return backward.checks_finite or self.finite.mode != "off"

    def judge(self, norm: Tensor | None, *, first: bool, defer: bool = False) -> bool:
        """Whether the window just reduced may update: equal gradients and equal sums give every rank the same answer.

        `norm`: of the gradients, where it is looked at; without it the alarms are read when that is free. `defer`: missing
        gradients are no error before step()."""
        finite = True
        if norm is not None or self.alarms.is_free() or first or self.ranks.tables_change:
            alarms, value = self.alarms.read(norm)
            finite = value is None or (math.isfinite(value) and not self._losses_are_bad(alarms))
            self._read_alarms(alarms, defer=defer)
        else:
            self.alarms.send()
            self.ranks.hears_later()
        return finite

    def judge_alone(self, norm: Tensor | None, *, defer: bool = False) -> bool:
        """The same of a window that was not reduced: what all ranks must act on is kept until they meet."""
        alarms, value = self.alarms.read(norm)
        if not self.unused.allowed and alarms.missing:
            if defer:
                self.deferred_alone = True
            else:
                self.deferred_errors.note_missing(self.unused.missing)
        return value is None or (math.isfinite(value) and not self._losses_are_bad(alarms))

    def read_round(self, rows: Sequence[Row]) -> None:
        """Act on what all ranks reported at an averaging; every rank does the same."""
        stop_signal.set_agreed(agreed=any(row.stops for row in rows))
        self.flips.read_rows(rows, self.comm)  # first: a flip is why a loss may not be finite
        self.deferred_errors.read_rows(rows, self.comm)

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
        self.deferred_errors.note_failure(step, f"losses {told}; gradients: {self.finite.bad_gradients()}")

    def agree_on_edited(self, norm: float, step: int, *, alone: bool, backward: Backward) -> bool:
        """Whether gradients that were not finite may be applied after all: the user has changed them, and this is their norm.

        Every rank is here, or has left its step() out: all of them have seen gradients that were not finite."""
        finite = math.isfinite(norm)
        return finite if alone else self.finite.agree(finite, step=step, stops=self.must_stop(backward))

    def must_stop(self, backward: Backward) -> bool:
        """An overflow is what a loss scale expects, while it can shrink; elsewhere it is an accident."""
        return self.finite.mode == "stop" and not backward.expects_overflow()

    def agree_to_flush(self, window: Window) -> None:
        """A rank whose window is empty would leave the others waiting in the reduce: asked here, where every rank is."""
        self.half_sent.refuse()
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
        self.flips.forget()
        self.deferred_errors.forget()

    def _read_alarms(self, alarms: Alarms, *, defer: bool = False) -> None:
        """Every rank has the same sums, and does the same."""
        self._require_one_place(alarms)
        stop_signal.set_agreed(agreed=bool(alarms.stops > 0))
        if defer:
            self.deferred = alarms
        else:
            self.unused.read_alarms(alarms)
        self.ranks.read_alarms(alarms)
        self.ranks.exchange()

    def _require_one_place(self, alarms: Alarms) -> None:
        """Ranks that reduce different updates together train wrong numbers, and hang at the end: all of them see it here."""
        if self.comm.size > 1 and not are_equal(alarms.place, alarms.place_squared, self.comm.size):
            places = [Place(*place) for place in self.comm.gather_json(list(self.place or Place(0, 0)))]
            listed = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise FleetError(
                f"the ranks have reduced different backwards together. {listed}. A rank has skipped a step() or a backward that "
                "the others made: let every rank make the same calls, or decide by fleet.util.all_reduce."
            )

    def _losses_are_bad(self, alarms: Alarms) -> bool:
        return self.finite.mode != "off" and not alarms.bad_losses == 0
