"""Guards the rule by which ranks that wait for each other in different collectives are told from ranks that are slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetx.dist.deadlock import Wait, is_certain, sentence

IN_BACKWARD = Wait(1, "training", 8, {"training": 8, "calls": 2}, "backward 1 of update 4")
IN_A_CALL = Wait(1, "calls", 3, {"training": 7, "calls": 3}, "fleet.util.all_reduce at train.py:9, before update 4")


def later(wait: Wait) -> Wait:
    return replace(wait, tick=wait.tick + 1)


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([IN_A_CALL, IN_BACKWARD], True),
        ([IN_A_CALL, IN_BACKWARD, IN_BACKWARD], True),
        ([IN_BACKWARD, IN_BACKWARD], False),  # a slow link: both have launched it
        ([IN_A_CALL, IN_A_CALL], False),
        # The rank in the call has launched the reduce before, which is still under way (overlapped averaging).
        ([replace(IN_A_CALL, launched={"training": 8, "calls": 3}), IN_BACKWARD], False),
        # Backwards of two models: the same number is a reduce of other bytes, and neither rank gets those that it waits for.
        ([replace(IN_BACKWARD, shape="all_reduce of 64 bytes"), replace(IN_BACKWARD, shape="all_reduce of 32 bytes")], True),
        ([replace(IN_BACKWARD, shape="all_reduce of 64 bytes")] * 2, False),
        # One has its reduce behind it, and the other may be about to: nothing is known of it.
        (
            [replace(IN_BACKWARD, shape="all_reduce of 64 bytes"), replace(IN_BACKWARD, number=7, shape="all_gather of 8 bytes")],
            False,
        ),
    ],
)
def test_only_waits_that_no_rank_can_end_are_a_deadlock(waits: list[Wait], expected: bool) -> None:
    assert is_certain([later(wait) for wait in waits], waits) is expected


def test_a_note_that_has_not_changed_is_of_a_wait_that_may_be_over() -> None:
    assert not is_certain([later(IN_A_CALL), IN_BACKWARD], [IN_A_CALL, IN_BACKWARD])


def test_a_rank_that_has_gone_on_between_the_readings_is_no_deadlock() -> None:
    assert not is_certain([later(IN_A_CALL), replace(IN_BACKWARD, tick=2, number=9)], [IN_A_CALL, IN_BACKWARD])


def test_the_sentence_names_each_place_once_with_its_ranks() -> None:
    said = sentence([IN_A_CALL] + [IN_BACKWARD] * 6)
    assert "rank 0 in fleet.util.all_reduce at train.py:9, before update 4; " in said
    assert "ranks 1, 2, 3, 4 and 2 more in backward 1 of update 4." in said


def test_waits_survive_their_notes() -> None:
    assert Wait.from_json(IN_A_CALL.to_json()) == IN_A_CALL
