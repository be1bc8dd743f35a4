"""Name ranks that have ended while others wait for them: how many updates each made, and the error of its script, if any.

A rank that ends leaves a note in the store before its connections close. A rank whose connection breaks, or whose wait lasts,
reads the notes: a collective that a rank has not launched before it left never ends.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import PeerError, first_line
from . import deadlock, heartbeat

ERROR_LETTERS = 300
has_lost_others = False
"""A collective of this rank has failed, since another rank had left: this one is then no cause."""


@dataclass(frozen=True, slots=True)
class Departure:
    """How far one rank came."""

    rank: int
    updates: int
    """Updates that it made."""
    launched: Mapping[str, int]
    """Collectives that it launched, by channel (deadlock.py)."""
    error: str = ""
    """First line of the error that ended its script; empty where the script came to its end."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Departure:
        return cls(**json.loads(text))


def own_departure(rank: int) -> Departure | None:
    """Describe how this rank ends; None where it does because another has ended."""
    error: BaseException | None = getattr(sys, "last_value", None)  # set when an error has ended the script
    if isinstance(error, PeerError) or has_lost_others or deadlock.found:
        return None
    told = "" if error is None else f"{type(error).__name__}: {first_line(error)}"[:ERROR_LETTERS]
    return Departure(rank, max(heartbeat.record.step - 1, 0), dict(deadlock.launched), told)


def never_launched(left: Sequence[Departure], channel: str, number: int) -> bool:
    """Tell whether a rank has left that cannot take part in a channel's collective of this number."""
    return any(departure.launched.get(channel, 0) < number for departure in left)


def sentence(left: Sequence[Departure], *, rank: int, step: int, place: str) -> str:
    """Name the ranks that left, and where this one waits. `step`: the update in whose backward it waits; 0: elsewhere."""
    ends: dict[tuple[int, str], list[int]] = {}
    for one in left:
        ends.setdefault((one.updates, one.error), []).append(one.rank)
    told = [
        f"{deadlock.name_ranks(sorted(set(ranks)))} made {updates} "
        f"update{'s' if updates != 1 else ''} and {f'ended with {error}' if error else 'left'}"
        for (updates, error), ranks in ends.items()
    ]
    waits = f"rank {rank} waits in its {ordinal(step)} ({place})" if step else f"rank {rank} waits in {place}"
    advice = "That error is the cause."
    if not any(one.error for one in left):
        advice = (
            "The ranks ran different numbers of batches or calls. Give every rank equally many batches, as fleet.sampler(data) "
            "does, and skip a batch on all ranks or on none, agreed by fleet.util.all_reduce."
        )
    return f"{'; '.join([*told, waits])}. {advice}"


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
