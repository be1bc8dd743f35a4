"""What the host hears of an update that was made by the device's answer: one update later, and what follows from it then.

update t         made where its gradients are finite, which the device knows (conditional_step.py); the host goes on
backward t + 1   the host hears whether it was: the loss scale moves, a skipped update is counted, numbers on the host are put
                 back; or all ranks stop, with the weights as they were before it

The next backward is where a host that is ahead of its device has given it a forward to do. Whatever needs the answer earlier asks
for it: a flush, an averaging, a checkpoint. Every rank asks at the same place, since what follows may be a collective.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from ...config import log
from ...dist import world
from ..checks.checks import Checks
from ..sidecar import Verdict
from ..slots import Backward


@final
@dataclass(frozen=True, slots=True, eq=False)
class Undecided:
    """An update of which the host does not know whether it was made."""

    step: int
    verdict: Verdict
    losses: list[Tensor]
    put_back: Callable[[], None]
    """Puts back what the optimizer has on the host, where the update was not made."""
    alone: bool
    """Made by this rank alone (Local SGD)."""


@final
class Outcomes:
    """Keeps the outcomes of one pair's updates, in their order."""

    def __init__(self, checks: Checks, backward: Backward) -> None:
        self._checks, self._backward = checks, backward
        self._skipped = 0
        self.open: Undecided | None = None
        """The last update, until it is heard whether it was made."""
        self.refused: Undecided | None = None
        """One that was not made, for which all ranks are to stop when they meet."""
        self._number = next(_numbers)

    @property
    def skipped(self) -> int:
        """Updates that were left out; waits for the last one's answer. No rank need ask along with this one."""
        is_out = self.open is not None and not self.open.verdict.is_finite() and not self._checks.must_stop(self._backward)
        return self._skipped + int(is_out)

    def restart(self, *, skipped: int) -> None:
        """Drop what there was to hear: a checkpoint was loaded, and it is of the weights before."""
        self._skipped, self.open, self.refused = skipped, None, None
        _unheard.pop(self._number, None)

    def leave_out(self, step: int, *, alone: bool) -> None:
        """Note an update that was not made."""
        self._skipped += 1
        self._checks.finite.note_skip(step, alone=alone)

    def wait_for(self, undecided: Undecided) -> None:
        """Note an update whose answer comes later."""
        self.open = undecided
        if self._checks.must_stop(self._backward):
            _unheard[self._number] = undecided.step, undecided.verdict

    def settle(self) -> None:
        """Hear what became of the last update, and act on it, before anything else is sent. Every rank is here."""
        try:
            self._checks.hear()
        except BaseException:  # the reason for which it was not made, on any rank, if it was not
            undecided, self.open = self.open, None
            _unheard.pop(self._number, None)
            if undecided is not None and not undecided.verdict.is_finite():
                undecided.put_back()
            raise
        self.learn()
        refused, self.refused = self.refused, None
        if refused is not None:
            _unheard.pop(self._number, None)
            self._checks.stop(refused.step, refused.losses, alone=False)

    @property
    def refused_step(self) -> int | None:
        """The update for which all ranks are to stop; None: there is none."""
        return None if self.refused is None else self.refused.step

    def learn(self) -> None:
        """Hear it, and do what is this rank's own: without a collective, so that one rank may ask for a state."""
        undecided, self.open = self.open, None
        if undecided is None:
            return
        finite = undecided.verdict.is_finite()
        if not finite:
            undecided.put_back()
            if self._checks.must_stop(self._backward) and not undecided.alone:
                self.refused = undecided
                return
            if self._checks.must_stop(self._backward):  # it tells the others when they average
                self._checks.stop(undecided.step, undecided.losses, alone=True)
        _unheard.pop(self._number, None)
        if not finite:
            self.leave_out(undecided.step, alone=undecided.alone)
        self._backward.settle(finite=finite)


# --- a run that ends before the next backward --------------------------------------------------------------------------

_numbers = itertools.count()
_unheard: dict[int, tuple[int, Verdict]] = {}
"""The last update by number of the pair's outcomes, if it may be one for which all ranks stop. Pairs may be gone before the run
ends, so this holds nothing of theirs."""


def _say_last_words() -> None:
    """Warn at the exit of a run that asked for nothing after its last update, if that update was not made."""
    while _unheard:
        _, (step, verdict) = _unheard.popitem()
        try:
            is_made = verdict.is_finite()
        except RuntimeError:  # the device has failed, and the script was told
            continue
        if not is_made:
            log.say(
                f"fleetx: the last update, {step}, was not made: its loss or gradients are not finite. The weights are those "
                "before it. A run that ends with fleet.save_checkpoint(...) or fleet.save_model(...) stops there with an error "
                "instead.",
                logging.ERROR,
                stream=sys.stderr,
            )


atexit.register(_say_last_words)
world.at_close(_say_last_words)
