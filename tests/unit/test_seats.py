"""Seats at node 0: who takes one, who takes one over, and who is lost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fleetx.launch.seats import (
    JOIN_SECONDS,
    Hello,
    Placed,
    Refusal,
    RunningClock,
    Seat,
    hello_from_text,
    hello_to_text,
    mismatch,
    patience_seconds,
    place,
)

HELLO = Hello(node_count=3, max_restart=0, process_count=2, address="10.0.0.1", rank=0)
SEATS = {0: Seat(HELLO, "", "10.0.0.1", 0.0)}
SECOND = replace(HELLO, rank=None, address="10.0.0.2")


def seat(address: str = "10.0.0.2", *, heard: float = 100.0, closed: float | None = None, waved: bool = False) -> Seat:
    return Seat(replace(SECOND, address=address), f"token of {address}", address, heard, closed, waved)


def ask(hello: Hello, seats: dict[int, Seat], *, now: float = 100.0, secret: bool = True) -> Placed | Refusal:
    return place(SEATS | seats, hello, hello.address, now_seconds=now, is_secret=secret)


def refused(hello: Hello, seats: dict[int, Seat], *, now: float = 100.0, secret: bool = True) -> Refusal:
    answer = ask(hello, seats, now=now, secret=secret)
    assert isinstance(answer, Refusal)
    return answer


def test_nodes_started_differently_are_told_which_flag_differs() -> None:
    assert mismatch(HELLO, replace(HELLO, rank=1, address="10.0.0.2", process_count=8)) is None
    assert "--nnodes 2, node 0 has 3" in (mismatch(HELLO, replace(HELLO, node_count=2)) or "")
    assert "--max_restart 1" in (mismatch(HELLO, replace(HELLO, max_restart=1)) or "")
    assert refused(replace(SECOND, node_count=2), {}).is_ours


def test_seats_are_given_by_rank_or_in_order_of_arrival() -> None:
    assert ask(replace(SECOND, rank=2), {}) == Placed(2, is_back=False)
    assert ask(SECOND, {}) == Placed(1, is_back=False)
    assert ask(replace(SECOND, address="10.0.0.9"), {1: seat()}) == Placed(2, is_back=False)


def test_a_seat_that_is_held_is_given_to_no_other_and_the_other_may_ask_again() -> None:
    for hello in (replace(SECOND, rank=1, address="10.0.0.9"), replace(SECOND, rank=1)):
        answer = refused(hello, {1: seat(), 2: seat("10.0.0.3")})
        assert "both have rank 1" in answer.sentence and not answer.is_final and not answer.is_ours
    full = refused(replace(SECOND, address="10.0.0.9"), {1: seat(), 2: seat("10.0.0.3")})
    assert "there is no place for 10.0.0.9" in full.sentence and not full.is_final


def test_a_stranger_with_rank_0_or_without_a_place_ends_nothing() -> None:
    stranger = refused(replace(SECOND, rank=0), {})
    assert "node 0 is the one at 10.0.0.1" in stranger.sentence and not stranger.is_ours
    assert "ranks are 0 to 2" in refused(replace(SECOND, rank=3), {}).sentence


def test_a_launcher_with_its_token_has_its_seat_again_at_any_time() -> None:
    hello = replace(SECOND, token="token of 10.0.0.2", rank=1)
    for taken in (seat(), seat(heard=95.0), seat(closed=99.0), seat(heard=1.0)):
        assert ask(hello, {1: taken}) == Placed(1, is_back=True)
        assert ask(replace(hello, address="10.0.0.99"), {1: taken}, secret=False) == Placed(1, is_back=True)


def test_a_token_of_another_seat_or_of_none_takes_nothing() -> None:
    assert isinstance(ask(replace(SECOND, rank=1, token="guessed", address="10.0.0.9"), {1: seat()}), Refusal)
    assert isinstance(ask(replace(SECOND, rank=1, token=""), {0: SEATS[0], 1: seat()}), Refusal)


def test_a_launcher_that_was_started_again_takes_a_seat_that_is_away() -> None:
    for away in (seat(heard=95.0), seat(closed=99.9)):
        assert ask(replace(SECOND, rank=1), {1: away}) == Placed(1, is_back=False)
        assert ask(SECOND, {1: away}) == Placed(1, is_back=False), "by its address, although seat 2 is free"


def test_another_machine_takes_a_seat_that_is_away_only_with_a_secret() -> None:
    other = replace(SECOND, rank=1, address="10.0.0.9")
    assert ask(other, {1: seat(closed=99.9)}) == Placed(1, is_back=False)
    answer = refused(other, {1: seat(closed=99.9)}, secret=False)
    assert "--job_secret_file" in answer.sentence and not answer.is_final


def test_a_replacement_must_start_as_many_ranks() -> None:
    answer = refused(replace(SECOND, rank=1, process_count=4), {1: seat(closed=99.9)})
    assert "starts 4 ranks, the one before it started 2" in answer.sentence


def test_a_seat_is_away_after_5_seconds_of_silence_and_lost_after_the_grace() -> None:
    taken = seat(heard=100.0)
    assert [taken.is_away(now) for now in (104.9, 105.0)] == [False, True]
    assert [taken.is_lost(now, 60.0) for now in (159.9, 160.0)] == [False, True]


def test_a_connection_closed_without_a_farewell_leaves_5_seconds_and_with_one_the_grace() -> None:
    killed, redials = seat(heard=100.0, closed=100.0), seat(heard=100.0, closed=105.0, waved=True)
    assert [killed.is_lost(now, 60.0) for now in (104.9, 105.0)] == [False, True]
    assert [redials.is_lost(now, 60.0) for now in (159.9, 160.0)] == [False, True]
    assert seat(closed=100.0).is_lost(102.0, 2.0), "a shorter grace holds here too"


def test_the_time_in_which_this_process_was_stopped_does_not_count() -> None:
    clock = RunningClock(1000.0)
    assert [clock.at(now) for now in (1000.5, 1001.0, 1061.0, 1061.5)] == [0.5, 1.0, 2.0, 2.5]
    assert clock.at(900.0) == 2.5, "a clock that goes back"


@pytest.mark.parametrize(
    ("situation", "seconds"),
    [
        ({"has_joined": False}, JOIN_SECONDS),
        ({}, 60.0),
        ({"is_closed": True}, 5.0),
        ({"can_restart": True, "is_closed": True}, 60.0 + JOIN_SECONDS),
        ({"can_restart": True}, 60.0 + JOIN_SECONDS),
    ],
)
def test_how_long_node_0_is_dialled(situation: dict[str, bool], seconds: float) -> None:
    told = {"has_joined": True, "can_restart": False, "is_closed": False} | situation
    assert patience_seconds(**told, grace_seconds=60.0) == seconds


def test_a_hello_survives_the_text_it_is_sent_as() -> None:
    hello = replace(HELLO, rank=2, token="x", attempt=3, spent=1, best_step=12)
    assert hello_from_text(hello_to_text(hello)) == hello


@pytest.mark.parametrize(
    "change",
    [
        {"address": "\x1b]0;owned\x07"},
        {"address": "10.0.0.1\n"},
        {"address": 3},
        {"rank": -1},
        {"rank": True},
        {"rank": "0"},
        {"process_count": 2**40},
        {"token": "x" * 65},
        {"attempt": 1.0},
        {"more": 1},
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    fields = json.loads(hello_to_text(HELLO))
    with pytest.raises(ValueError, match="."):
        hello_from_text(json.dumps({**fields, **change}).encode())


@pytest.mark.parametrize("text", [b"", b"3", b"[]", b"{}", b"[" * 60_000])
def test_nonsense_is_no_hello(text: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        hello_from_text(text)
