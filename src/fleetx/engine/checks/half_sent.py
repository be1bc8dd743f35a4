"""Refuse to go on after a backward that failed half-way on some ranks only, with a part of its gradients sent.

The other ranks wait for the rest of them. What this rank sends next would be taken for it: other gradients, or a message of
another size, at which the transport ends the process. Where the backward failed on every rank at the same place, all may go on.
"""

from __future__ import annotations

import time
from typing import final

from ...dist.comm import Comm
from ...errors import FleetError

SECONDS_FOR_OTHERS = 15.0
"""How long this rank waits to learn that the others have failed too. Those that have not wait for this one, and cannot say so."""


@final
class HalfSent:
    """What this rank has sent of backwards that failed, and whether the others have sent as much."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._count = 0
        """Backwards that failed so, in this run."""
        self.open: tuple[str, str, str] | None = None
        """The last failed backward: under which keys the ranks leave notes, this rank's note, and the error; None once it is
        settled."""

    def note(self, pair: int, *, place: object, sent: int, total: int) -> None:
        """Note that a backward has failed after `sent` of `total` buckets were sent. No collective: the other ranks may not be
        here."""
        if self._comm.size == 1:
            return
        self._count += 1
        rank, note = self._comm.rank, f"{sent} of {total} buckets in {place}"
        key = f"fleetx/half_sent/{pair}/{self._count}"
        self._comm.post_note(f"{key}/{rank}", note)
        self.open = (
            key,
            note,
            f"rank {rank}: a backward failed here after it had sent {note}, and was caught; the other ranks, where it did not "
            "fail, wait for the rest, and no later gradients can take its place. Let the error end this process (fleetrun "
            "--max_restart goes on from a checkpoint). A batch that may fail is skipped before its backward, on all ranks or on "
            "none; fleet.find_batch finds the largest one that fits into memory.",
        )

    def refuse(self) -> None:
        """Raise before the next collective, unless the same backward has failed on every rank, after the same buckets."""
        if self.open is None:
            return
        (key, note, text), self.open = self.open, None
        keys = [f"{key}/{rank}" for rank in range(self._comm.size)]
        deadline = time.monotonic() + SECONDS_FOR_OTHERS
        while (notes := self._comm.read_notes(keys)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if notes is None or any(theirs != note for theirs in notes):
            self._comm.post_error(text)
            raise FleetError(text)
