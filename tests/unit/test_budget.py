"""Restarts: how many, when their number begins again, and the pauses between them."""

from __future__ import annotations

from fleetx.launch.budget import Limits, Retry, Tries, after_failure, pause_seconds

LIMITS = Limits(max_restart=3, window_seconds=100.0)


def fail(tries: Tries, *, ran: float = 1.0, step: int = 0) -> Retry | None:
    return after_failure(tries, LIMITS, ran_seconds=ran, step=step)


def spend(count: int, *, ran: float = 1.0, step: int = 0) -> Tries:
    tries = Tries()
    for _ in range(count):
        retry = fail(tries, ran=ran, step=step)
        assert retry is not None
        tries = retry.tries
    return tries


def test_a_budget_without_progress_is_spent_once() -> None:
    assert fail(spend(3)) is None
    assert after_failure(Tries(), Limits(0), ran_seconds=1e6, step=10**6) is None, "0 restarts are none, however well it ran"


def test_an_attempt_that_ran_long_and_went_further_gives_the_budget_back() -> None:
    tries = spend(3, step=50)
    retry = fail(tries, ran=100.0, step=51)
    assert retry is not None and retry.tries == Tries(spent=1, in_a_row=1, best_step=51)


def test_running_long_at_the_same_step_or_far_in_a_moment_gives_nothing_back() -> None:
    assert fail(spend(3, step=50), ran=1000.0, step=50) is None, "it hangs at step 50 each time"
    assert fail(spend(3, step=50), ran=99.0, step=60) is None


def test_a_script_without_steps_makes_progress_by_running() -> None:
    assert fail(spend(3), ran=99.0) is None
    retry = fail(spend(3), ran=100.0)
    assert retry is not None and retry.tries.spent == 1


def test_pauses_grow_from_the_third_restart_in_a_row_and_have_an_end() -> None:
    assert [pause_seconds(number) for number in range(1, 11)] == [0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert pause_seconds(10**9) == 30


def test_a_step_further_ends_the_row_but_does_not_give_back_restarts() -> None:
    retry = fail(spend(2, step=5), step=6)
    assert retry is not None and (retry.tries.spent, retry.tries.in_a_row, retry.pause_seconds) == (3, 1, 0.0)
