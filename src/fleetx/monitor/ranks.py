"""Send every rank's time split to worker 0 without a collective, which would hang if only one rank has a monitor.

Each rank posts its sums to the store of the process group about once a second, and worker 0 reads what is there. The sums of
two ranks may be a second apart.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from typing import final

from ..dist.world import World
from .split import PARTS, Split, compute_of, sum_of, zero_split

POST_SECONDS = 1.0
LAST_SECONDS = 1.0
"""How long worker 0 waits at the end for the last sums of the others."""
_numbers: dict[str, itertools.count[int]] = {}
"""Monitors opened in this process, by the token of the world: ranks agree on it, however many groups each has been in before."""

ByRank = dict[int, dict[str, float]]


def summarize(split: Mapping[str, float]) -> dict[str, float]:
    """Add the parts of a split up to the entries of a record."""
    return {
        "seconds": sum(split[part] for part in PARTS),
        "compute": compute_of(split),
        "communication": split["communication"],
        "data": split["data"],
    }


def slowest(ranks: Mapping[int, Mapping[str, float]]) -> tuple[int, float] | None:
    """Return the rank that waited least, for which the others waited, and by how many seconds less than the longest wait."""
    if len(ranks) < 2:
        return None
    waits = {rank: seconds["communication"] for rank, seconds in ranks.items()}
    rank = min(waits, key=lambda one: waits[one])
    return rank, max(waits.values()) - waits[rank]


@final
class Ranks:
    def __init__(self, here: World) -> None:
        self._comm = here.comm
        self._key = f"fleetx/monitor/{here.token}/{next(_numbers.setdefault(here.token, itertools.count(1)))}"
        self._sums = zero_split()
        self._taken: dict[int, Split] = {}
        self._due = time.monotonic() + POST_SECONDS

    def add(self, split: Mapping[str, float]) -> None:
        self._sums = sum_of(self._sums, split)
        if self._comm.size > 1 and time.monotonic() >= self._due:
            self._due = time.monotonic() + POST_SECONDS
            self._post()

    def _post(self, *, is_last: bool = False) -> None:
        self._comm.post_note(f"{self._key}/{self._comm.rank}", json.dumps([is_last, self._sums]))

    def take(self) -> ByRank | None:
        """Return the time since the last call; None unless all ranks have posted new sums."""
        sums = self._latest_sums()
        if sums is None or any(sums[rank] == self._taken.get(rank) for rank in sums):
            return None
        before = {rank: self._taken.get(rank) or zero_split() for rank in sums}
        self._taken = sums
        return {rank: summarize({part: split[part] - before[rank][part] for part in PARTS}) for rank, split in sums.items()}

    def close(self, *, waits: bool) -> ByRank | None:
        """Return the latest sums of this start; None if a rank has posted nothing. `waits`: give the others a second to post."""
        if self._comm.size > 1:
            self._post(is_last=True)
        until = time.monotonic() + (LAST_SECONDS if waits and self._comm.rank == 0 else 0.0)
        while not self._all_have_ended() and time.monotonic() < until:
            time.sleep(0.01)
        sums = self._latest_sums()
        return None if sums is None else {rank: summarize(split) for rank, split in sums.items()}

    def _latest_sums(self) -> dict[int, Split] | None:
        notes = self._notes()
        if notes is None:
            return None
        sums = {rank: note[1] for rank, note in notes.items()}
        return sums | {self._comm.rank: dict(self._sums)}

    def _all_have_ended(self) -> bool:
        notes = self._notes()
        return notes is not None and all(is_last for rank, (is_last, _) in notes.items() if rank != self._comm.rank)

    def _notes(self) -> dict[int, tuple[bool, Split]] | None:
        if self._comm.size == 1:
            return {0: (True, self._sums)}
        texts = self._comm.read_notes([f"{self._key}/{rank}" for rank in range(self._comm.size)])
        if texts is None:
            return None
        notes = {rank: _parse(text) for rank, text in enumerate(texts)}
        known = {rank: note for rank, note in notes.items() if note is not None}
        return known if len(known) == len(notes) else None


def _parse(text: str) -> tuple[bool, Split] | None:
    """Return whether a note is the last of its rank, and its sums; None if it is no such note: other programs reach the store."""
    try:
        is_last, sums = json.loads(text)
        return bool(is_last), {part: float(sums[part]) for part in PARTS}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
