"""Sentences about ranks that left: who, after how many updates, with which error, and where the others wait."""

from __future__ import annotations

import sys

import pytest

from fleetx.dist import heartbeat
from fleetx.dist.departures import Departure, never_launched, ordinal, own_departure, sentence
from fleetx.errors import PeerError


def test_ranks_that_made_as_many_updates_are_told_together_and_one_update_is_singular() -> None:
    left = [Departure(3, 3, {}), Departure(1, 3, {}), Departure(2, 1, {})]
    told = sentence(left, rank=0, step=4, place="backward 1 of update 4")
    start = (
        "ranks 1, 3 made 3 updates and left; rank 2 made 1 update and left; rank 0 waits in its 4th (backward 1 of update 4). "
    )
    assert told.startswith(start) and "fleet.sampler(data)" in told


def test_an_error_that_ended_a_rank_is_its_reason_and_no_batches_are_counted() -> None:
    told = sentence([Departure(1, 3, {}, "ValueError: a row")], rank=0, step=0, place="a call before update 4")
    assert told == (
        "rank 1 made 3 updates and ended with ValueError: a row; rank 0 waits in a call before update 4. That error is the cause."
    )


def test_only_a_collective_that_a_rank_never_launched_cannot_end() -> None:
    left = [Departure(1, 3, {"training": 7})]
    assert not never_launched(left, "training", 7)
    assert never_launched(left, "training", 8) and never_launched(left, "calls", 1)


def test_a_note_reads_as_it_was_written() -> None:
    one = Departure(1, 3, {"training": 7}, "ValueError: a row")
    assert Departure.from_json(one.to_json()) == one


def test_a_rank_tells_its_updates_and_its_scripts_error_but_not_one_that_another_rank_caused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat.record, "step", 4)
    monkeypatch.setattr(sys, "last_value", ValueError("a row\nof three"), raising=False)
    told = own_departure(1)
    assert told is not None and (told.updates, told.error) == (3, "ValueError: a row")
    monkeypatch.setattr(sys, "last_value", PeerError("lost"))
    assert own_departure(1) is None


def test_ordinals() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th"]
    )
