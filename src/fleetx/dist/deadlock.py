"""Find ranks that wait for each other in different collectives: one in backward, another in a call such as fleet.util.all_reduce,
or in a backward of another model.

A rank that waits long notes in the store what it waits for. Two readings of all ranks' notes, with no change between them but
their ticks, show that no rank has gone on; they are a deadlock if no collective that a rank waits for was launched by all, or if
the same number is an unlike collective on two ranks.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config.text import listed

launched: collections.Counter[str] = collections.Counter()
"""Collectives this process has launched in each channel since it joined its group."""

START = "ranks wait for each other in different calls"
found = ""
"""The sentence about a deadlock this rank is part of; its collectives never end, so every later wait raises at once."""
holds_all = False
"""In this deadlock ranks hold each other within one group: closing it would wait for a collective that no connection ends."""


def forget() -> None:
    """Begin afresh, with another process group."""
    global found, holds_all
    found, holds_all = "", False
    launched.clear()


@dataclass(frozen=True, slots=True)
class Wait:
    """What one rank waits for."""

    tick: int
    """Counts the notes of this wait: a note that stays the same is of a wait that is over."""
    channel: str
    """"training", or "calls" for what the script calls itself; each has connections of its own."""
    number: int
    """Number of the collective among those this rank has launched in the channel, from 1."""
    launched: Mapping[str, int]
    """Collectives the rank has launched, by channel."""
    place: str
    """Where the rank is, for the error."""
    shape: str = ""
    """Kind and bytes of the collective: the same on all ranks, or they have paired two that do not belong together."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Wait:
        return cls(**json.loads(text))


def is_certain(waits: Sequence[Wait], before: Sequence[Wait]) -> bool:
    """Tell whether no rank can ever go on, from two readings of all ranks' waits."""
    unchanged = all(
        now.tick > then.tick and dataclasses.replace(now, tick=then.tick) == then for now, then in zip(waits, before, strict=True)
    )
    differ = len({wait.channel for wait in waits}) > 1
    return unchanged and (are_unlike(waits) or (differ and not any(_can_end(wait, waits) for wait in waits)))


def are_unlike(waits: Sequence[Wait]) -> bool:
    """Tell whether two ranks wait in one channel for the same number, but for different collectives: backwards of two models of
    different sizes, say, where the generator's stands under a condition. Neither gets the bytes that it waits for."""
    return len({(wait.channel, wait.number) for wait in waits}) < len({(wait.channel, wait.number, wait.shape) for wait in waits})


def _can_end(wait: Wait, waits: Sequence[Wait]) -> bool:
    """Tell whether all ranks have launched the collective: then it ends, however slow the link is."""
    return all(other.launched.get(wait.channel, 0) >= wait.number for other in waits)


def sentence(waits: Sequence[Wait]) -> str:
    """Name each rank's place, up to one for each, and what to write."""
    places: dict[str, list[int]] = {}
    for rank, wait in enumerate(waits):
        places.setdefault(wait.place, []).append(rank)
    where = "; ".join(f"{name_ranks(ranks)} in {place}" for place, ranks in places.items())
    return (
        f"{START}: {where}. They ran different numbers of batches, or a backward or a call stands under a "
        "condition that holds on some ranks only. Give every rank equally many batches, as fleet.sampler(data) does, and make "
        "each backward and each such call on all ranks."
    )


def name_ranks(ranks: Sequence[int], most: int = 4) -> str:
    """Name ranks, at most `most` of them: "rank 3", "ranks 0, 1, 2, 3 and 4 more"."""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {listed([str(rank) for rank in ranks], most)}"
