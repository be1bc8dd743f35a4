"""Per-step checks. Flags travel with the gradients and are summed with them, so that all ranks react alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

from torch import Tensor

from ...config.text import listed
from ...dist import stop_signal
from ...dist.comm import Comm
from ...errors import ConfigError, FleetError
from ..buckets import Buckets
from ..rank_status import Row
from ..sidecar import AlarmReader, Alarms, Verdict
from ..slots import Backward
from ..window import Window
from .first_batch import FirstLook
from .flips import FlipWatch
from .half_sent import HalfSent
from .nonfinite import NonFiniteGuard

if TYPE_CHECKING:
    from .desync import RankCheck


class Place(NamedTuple):
    """Where a rank is when it reduces: the same on all ranks, or they reduce different things together."""

    update: int
    reduce: int
    dropped: int = 0
    """Updates whose gradients were reduced and then thrown away by zero_grad()."""
    pair: int = 1
    """Of model and optimizer, in the order of fleet.distribute(...), the same on all ranks."""

    def number(self) -> float:
        """Return a small number that differs between neighbours: its square, summed over thousands of ranks, is exact in
        float32."""
        return float((31 * self.update + 7 * self.reduce + 17 * self.dropped + 9 * self.pair) % 61)

    def __str__(self) -> str:
        dropped = f", {self.dropped} dropped by zero_grad() so far" if self.dropped else ""
        model = f" of model {self.pair}" if self.pair > 1 else ""
        return f"backward {self.reduce} of update {self.update}{model}{dropped}"


def are_equal(total: float | Tensor, squares: float | Tensor, count: int) -> bool:
    """Return whether `count` numbers with this sum and sum of squares are all the same (Cauchy and Schwarz)."""
    return float(total) ** 2 == count * float(squares)


EARLY_LOOKS = (1, 10)
"""Updates after which ranks are compared, besides every `desync_check_steps`-th: what drives them apart mostly does so from the
start."""


def looks_after(index: int, every: int) -> bool:
    """Return whether ranks are compared after this update; `every` is 0 where they never are."""
    return every > 0 and (index in EARLY_LOOKS or index % every == 0)


@final
@dataclass(slots=True)
class Checks:
    unused: UnusedCheck
    first_look: FirstLook | None
    """Check of the first batch; None once it has run."""
    finite: NonFiniteGuard
    ranks: RankCheck
    alarms: AlarmReader
    deferred_errors: DeferredErrors
    half_sent: HalfSent
    flips: FlipWatch
    comm: Comm
    deferred: Alarms | None = None
    """Missing gradients of a window that a bare backward has reduced: an error in step(), if no other backward fills them."""
    deferred_alone: bool = False
    """Whether a rank that trains alone has such missing gradients."""
    place: Place | None = None
    """Place of the last reduce; None before the first."""

    def before_reduce(self, window: Window, *, again: bool = False) -> None:
        """Act on alarms read late; and once, before the first reduce: all ranks weigh or none, and each has its own data.

        `again`: the window was reduced before, and its alarms are sent once more."""
        if self.half_sent.open is not None:
            self.half_sent.refuse()
        self.deferred, self.deferred_alone = None, False
        if again:
            self.alarms.forget()
        self.hear()
        if self.first_look is not None:
            look, self.first_look = self.first_look, None
            look.finish(self.comm, loss=window.losses[0] if window.losses else None, weighted=bool(window.weights))

    def hear(self) -> None:
        """Act on what the ranks have told with the last reduce, where it was not read yet: on every rank at the same place."""
        late = self.alarms.sent_before()
        if late is not None:
            self._read_alarms(late)

    def before_update(self) -> None:
        """Raise what a bare backward has left open: every rank is in step(), with the same sums."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            self.unused.read_alarms(deferred)
        if self.deferred_alone:
            self.deferred_alone = False
            self.deferred_errors.note_missing(self.unused.missing)

    def alarms_of(self, window: Window, place: Place) -> Alarms:
        bad_losses = 0.0 if self.finite.mode == "off" else window.count_bad_losses(self.alarms.stays_on)
        self.place = place
        number = self.place.number()
        return Alarms(bad_losses=bad_losses, stops=float(stop_signal.requested), place=number, place_squared=number * number)

    def looks_at_norm(self, backward: Backward) -> bool:
        return backward.checks_finite or self.finite.mode != "off"

    def judge(self, norm: Tensor | None, *, first: bool, defer: bool = False) -> Verdict:
        """Decide whether the window just reduced may update: equal gradients and equal sums give every rank the same answer.

        `norm`: of the gradients, where it is looked at. `first`: of a run, which is read at once, so that a mistake in the script
        is an error where it is made. `defer`: missing gradients are no error before step()."""
        if first or self.ranks.tables_change or not self.alarms.reads_late:
            alarms, value = self.alarms.read(norm)
            self._read_alarms(alarms, defer=defer)
            return self._verdict_of(alarms, value)
        if self.alarms.travel:
            self.ranks.hears_later()
            if norm is None:
                self.alarms.send()
        else:
            self._read_alarms(self.alarms.own(), defer=defer)  # of one rank, which knows them
        return Verdict(True) if norm is None else self.alarms.send_with_verdict(norm)

    def judge_alone(self, norm: Tensor | None, *, defer: bool = False) -> Verdict:
        """Judge a window that was not reduced: what all ranks must act on is kept until they meet."""
        if not self.unused.allowed and self.alarms.own().missing:
            if defer:
                self.deferred_alone = True
            else:
                self.deferred_errors.note_missing(self.unused.missing)
        if norm is not None and self.alarms.reads_late:
            return self.alarms.send_with_verdict(norm)
        return self._verdict_of(*self.alarms.read(norm))

    def _verdict_of(self, alarms: Alarms, norm: float | None) -> Verdict:
        return Verdict(norm is None or (math.isfinite(norm) and not self._losses_are_bad(alarms)))

    def read_round(self, rows: Sequence[Row]) -> None:
        """Act on what all ranks reported at an averaging; every rank does the same."""
        stop_signal.set_agreed(agreed=any(row.stops for row in rows))
        self.flips.read_rows(rows, self.comm)  # first: a flip is why a loss may not be finite
        self.deferred_errors.read_rows(rows, self.comm)

    def compares_after(self, index: int) -> bool:
        """Return whether ranks are compared after this update."""
        return looks_after(index, self.ranks.every)

    def after_update(self, index: int) -> None:
        """Compare the ranks, or begin to, where it is time."""
        if self.ranks.pending is not None or self.compares_after(index):
            self.ranks.after_update(index)

    def before_sharded(self, index: int) -> None:
        """Compare the ranks' weights where it is time, before an update in which each rank sends its share to all: after it they
        would be equal, whatever they were."""
        if self.compares_after(index):
            self.ranks.before_sharded(index)

    def after_round(self, index: int, *, equal: bool) -> None:
        """Weights and buffers are an average. `equal`: the same on all ranks."""
        self.finite.remember()
        if equal:
            self.ranks.after_round(index)

    def stop(self, step: int, losses: list[Tensor], *, alone: bool) -> None:
        """Raise now, or, where the others know of nothing, when the ranks meet."""
        if not alone:
            self.finite.refuse(step, losses)
        told = ", ".join(repr(float(loss)) for loss in losses) or "not seen"
        self.deferred_errors.note_failure(step, f"losses {told}; gradients: {self.finite.bad_gradients()}")

    def agree_on_edited(self, norm: float, step: int, *, alone: bool, backward: Backward) -> bool:
        """Agree whether gradients that were not finite may be applied after all: the user has changed them, and this is their
        norm.

        Every rank is here, or has left its step() out: all of them have seen gradients that were not finite."""
        finite = math.isfinite(norm)
        return finite if alone else self.finite.agree(finite, step=step, stops=self.must_stop(backward))

    def must_stop(self, backward: Backward) -> bool:
        """Return whether an overflow is an error: a loss scale expects it, while it can shrink; elsewhere it is an accident."""
        return self.finite.mode == "stop" and not backward.expects_overflow()

    def agree_to_flush(self, window: Window) -> None:
        """Raise on every rank where one has an empty window: it would leave the others waiting in the reduce."""
        if self.half_sent.open is not None:
            self.half_sent.refuse()
        counts = self.comm.gather_json(window.micro_steps) if self.comm.size > 1 else []
        if any(counts) and not all(counts):
            raise FleetError(
                f"optimizer.flush() found {counts} micro-batches in the ranks' windows; one with none has nothing to reduce. "
                "Give every rank equally many batches: fleet.sampler(data) does."
            )

    def forget(self) -> None:
        """Drop what is under way: a checkpoint was loaded, and it is of the weights before."""
        self.alarms.forget()
        self.ranks.forget()
        self.flips.forget()
        self.deferred_errors.forget()

    def _read_alarms(self, alarms: Alarms, *, defer: bool = False) -> None:
        """Act on the summed alarms. Every rank has the same sums, and does the same."""
        self._require_one_place(alarms)
        if alarms.stops > 0:
            stop_signal.set_agreed(agreed=True)
        if defer:
            self.deferred = alarms
        else:
            self.unused.read_alarms(alarms)
        if alarms.changed_tables > 0 or alarms.unequal_buffers > 0 or not self.ranks.tables_are_settled:
            self.ranks.read_alarms(alarms)
        if self.ranks.taken is not None:
            self.ranks.exchange()

    def _require_one_place(self, alarms: Alarms) -> None:
        """Raise on all ranks where they reduce different updates together: they would train wrong numbers, and hang at the
        end."""
        if self.comm.size > 1 and not are_equal(alarms.place, alarms.place_squared, self.comm.size):
            places = [Place(*place) for place in self.comm.gather_json(list(self.place or Place(0, 0)))]
            listed = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise FleetError(
                f"the ranks have reduced different backwards together. {listed}. A rank has skipped a step() or a backward that "
                "the others made, or made one alone: let every rank make the same calls, or decide by fleet.util.all_reduce. A "
                "backward for one rank alone (a map of what the model looks at, say) stays local under with fleet.no_sync():."
            )

    def _losses_are_bad(self, alarms: Alarms) -> bool:
        return self.finite.mode != "off" and not alarms.bad_losses == 0


# --- Parameters without a gradient: an error that names them, or (find_unused_parameters) None where no rank used them ---


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
        """Return which parameters were used by any rank, in bucket order; None when all must have been."""
        if self.allowed:
            return [count > 0 for count in self.buckets.use_counts()]
        self.missing = self.buckets.missing()
        return None

    def read_alarms(self, alarms: Alarms) -> None:
        """Read the alarms of the window that was reduced last, known now on every rank."""
        if not self.allowed and float(alarms.missing) > 0:
            raise ConfigError(missing_gradients_message(self.comm.gather_json(self.missing), hint=self.hint()))


# --- What went wrong on a rank that trains alone, kept until the ranks meet: then all of them raise, or none --------
# One rank that raised by itself would leave the others waiting in the next averaging.


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
        """Raise what the rows announce. Every rank is here with the same rows, and so all of them gather, or none does.

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
