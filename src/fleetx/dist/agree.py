"""Run a piece of work on all ranks, and raise on all of them where it fails on one.

Suppose each rank opens a file and then trains, and the file is missing on rank 3. If rank 3 raises there and then, the others go
on to the next all-reduce and wait in it for a rank that never comes: until the time limit of the process group, or for ever. So
no rank raises by itself. Each keeps its error, all exchange what went wrong (the one collective here, which every rank reaches
because the work's errors are caught), and then all raise or none does.

The work must not call collectives itself: a rank that fails in front of one of them would not be there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, final

from ..errors import FleetError
from .comm import Comm

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Failures:
    """The errors of a piece of work that failed on at least one rank."""

    by_rank: dict[int, Any]
    """What `report` made of the error of each rank that failed, in rank order; the same on all ranks."""
    own: Exception | None
    """The error of this rank; None if it did its work."""

    @property
    def first(self) -> tuple[int, Any]:
        """The lowest rank that failed and its report. All ranks see the same one, so they can act alike."""
        return next(iter(self.by_rank.items()))

    @property
    def text(self) -> str:
        """The reports in one line, equal ones once."""
        return "; ".join(dict.fromkeys(self.by_rank.values()))


def sentence(error: Exception) -> str:
    """Return the text of an error of this library, which stands alone; of another, its kind too."""
    return str(error) if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"


def run_and_share(
    comm: Comm,
    work: Callable[[], T],
    share: Callable[[T], Any],
    *,
    fails: Callable[[Failures], Exception],
    report: Callable[[Exception], Any] = sentence,
    catches: type[Exception] = Exception,
) -> tuple[T, list[Any]]:
    """Run `work` on every rank; return this rank's result and what `share` makes of the result of each rank. Collective.

    If it failed on some rank, every rank raises the error that `fails` returns. `report` makes of an error what travels, and
    `share` of a result; both must give JSON. Errors other than `catches` are raised at once: those that all ranks have alike.
    """
    own: Exception | None = None
    report_and_share: list[Any] = [None, None]
    try:
        result = work()
        report_and_share[1] = share(result)
    except catches as error:
        own = error
        report_and_share[0] = report(error)
    ranks = comm.gather_json(report_and_share)
    failures = Failures({rank: reported for rank, (reported, _) in enumerate(ranks) if reported is not None}, own)
    if not failures.by_rank:
        return result, [shared for _, shared in ranks]
    raised = fails(failures)
    try:
        if raised is own:
            raise raised
        raise raised from own
    finally:
        # A traceback holds this frame. If the frame held the error too, both would live until the garbage collector runs, and
        # with them the tensors of the frames that failed.
        del own, failures, raised


def run_on_all(
    comm: Comm,
    work: Callable[[], T],
    *,
    fails: Callable[[Failures], Exception],
    report: Callable[[Exception], Any] = sentence,
    catches: type[Exception] = Exception,
) -> T:
    """Run `work` on every rank and return this rank's result; see `run_and_share` for its errors. Collective."""
    return run_and_share(comm, work, lambda _: None, fails=fails, report=report, catches=catches)[0]


def run_on_first(
    comm: Comm,
    work: Callable[[], Any],
    *,
    fails: Callable[[Failures], Exception],
    report: Callable[[Exception], Any] = sentence,
) -> Any:
    """Run `work` on rank 0 alone and return its result, which must be JSON, on every rank; errors likewise. Collective."""
    return run_and_share(comm, work if comm.rank == 0 else _nothing, lambda result: result, fails=fails, report=report)[1][0]


def _nothing() -> None:
    return None


def ranks_where(comm: Comm, condition: bool) -> list[int]:
    """Return the ranks on which the condition holds, the same list on all: who refuses by it refuses on all ranks. Collective."""
    return [rank for rank, holds in enumerate(comm.gather_json(condition)) if holds]
