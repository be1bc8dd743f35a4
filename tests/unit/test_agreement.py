"""What follows from how the nodes stand: node 0's decisions, without a network."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from fleetx.launch import agreement
from fleetx.launch.agreement import Cause, End, Job, NodeState, Phase
from fleetx.launch.budget import Limits, Tries

KILLED = Cause("rank 1 was killed", "rank 1 on node 0 failed: killed", -9, time_ns=20, is_crash=True, is_retryable=True)
RAISED = Cause("rank 3 failed", "rank 3 on node 1 failed: reset", 1, time_ns=10, is_crash=False, is_retryable=True)
LOST = Cause("node 1 is gone", "node 1 is gone", 1, time_ns=90, is_crash=True, is_retryable=True)
BROKEN = replace(RAISED, elsewhere="rank 0 on node 0 failed: reset", is_consequence=True)


def job(nodes: int = 2, *, port: int | None = 4000, **changes: object) -> Job:
    return replace(Job(process_counts=(2,) * nodes, port=port), **changes)  # type: ignore[arg-type]


def decide(
    before: Job, *states: NodeState, max_restart: int = 3, now_seconds: float = 100.0, away: dict[int, str] | None = None
) -> Job:
    limits = Limits(max_restart)
    return agreement.decide(before, dict(enumerate(states)), limits=limits, now_seconds=now_seconds, away=away)


def running(attempt: int = 0, **changes: object) -> NodeState:
    return replace(NodeState(attempt, Phase.RUNNING), **changes)  # type: ignore[arg-type]


def failed(cause: Cause, attempt: int = 0) -> NodeState:
    return NodeState(attempt, Phase.FAILED, cause)


def test_the_store_is_opened_once_every_node_is_ready_for_this_attempt() -> None:
    ready, late = NodeState(1, Phase.READY), NodeState(0, Phase.READY)
    before = job(port=None, attempt=1)
    assert agreement.all_ready(before, {0: ready, 1: ready})
    assert not agreement.all_ready(before, {0: ready, 1: late})
    assert not agreement.all_ready(before, {0: ready})
    assert not agreement.all_ready(job(attempt=1), {0: ready, 1: ready})


def test_a_failure_leads_to_the_next_attempt_without_a_store() -> None:
    after = decide(job(), failed(KILLED), running())
    assert (after.attempt, after.port, after.end) == (1, None, None)
    assert after.reason == KILLED.elsewhere


def test_two_failures_at_once_cost_one_restart() -> None:
    after = decide(job(), failed(KILLED), failed(RAISED))
    assert after.attempt == 1
    assert decide(after, failed(KILLED), failed(RAISED)) == after


def test_an_error_waits_a_moment_for_the_crash_that_may_have_caused_it() -> None:
    first = decide(job(), running(), failed(RAISED), now_seconds=100.0)
    assert (first.attempt, first.failing_since_seconds) == (0, 100.0)
    assert decide(first, failed(KILLED), failed(RAISED), now_seconds=100.1).reason == KILLED.elsewhere
    assert decide(first, running(), failed(RAISED), now_seconds=100.4).reason == RAISED.elsewhere


def test_alone_a_node_decides_at_once() -> None:
    after = decide(job(nodes=1), failed(RAISED))
    assert (after.attempt, after.reason) == (1, RAISED.here)


def test_a_spent_budget_ends_the_job_with_the_cause() -> None:
    after = decide(job(attempt=3, tries=Tries(spent=3)), failed(KILLED, attempt=3), running(3))
    assert (after.end, after.sentence, after.exit_code, after.blamed_node) == (End.FAILED, KILLED.elsewhere, -9, 0)


def test_what_would_fail_again_is_not_tried_again() -> None:
    assert decide(job(), failed(replace(KILLED, is_retryable=False)), running()).end is End.FAILED


def test_the_job_has_succeeded_when_all_nodes_are_done() -> None:
    done = NodeState(0, Phase.DONE)
    assert decide(job(), done, running()).end is None
    assert decide(job(), done, done).end is End.SUCCEEDED


def test_a_node_that_fails_after_another_was_done_restarts_both() -> None:
    assert decide(job(), NodeState(0, Phase.DONE), failed(KILLED)).attempt == 1


def test_a_stop_is_passed_on_and_then_nothing_is_restarted() -> None:
    stopping = decide(job(), running(), running(stop_signal=signal.SIGTERM))
    assert (stopping.stop_signal, stopping.stop_node, stopping.end) == (signal.SIGTERM, 1, None)
    assert decide(stopping, running(), failed(RAISED)).end is End.STOPPED
    assert decide(stopping, NodeState(0, Phase.DONE), NodeState(0, Phase.DONE)).end is End.STOPPED


def test_a_stop_before_the_ranks_have_started_ends_at_once() -> None:
    waiting = NodeState(1, Phase.READY, stop_signal=signal.SIGINT)
    assert decide(job(port=None, attempt=1), waiting, NodeState(0, Phase.FAILED)).end is End.STOPPED


def test_a_node_that_leaves_ends_the_job() -> None:
    after = decide(job(), running(), NodeState(0, Phase.LEFT))
    assert (after.end, after.blamed_node) == (End.FAILED, 1)


def test_ranks_that_wait_on_every_node_hang_everywhere() -> None:
    stuck = running(all_wait=True)
    assert not decide(job(), stuck, running()).all_hang
    assert decide(job(), stuck, stuck).all_hang
    assert decide(job(), stuck, NodeState(0, Phase.DONE)).all_hang, "no rank there will come any more"


def test_a_hang_of_all_waits_until_every_node_has_named_its_own_ranks() -> None:
    stuck = running(all_wait=True)
    hang = decide(job(), stuck, stuck)
    one_told = decide(hang, failed(KILLED), stuck, max_restart=0, now_seconds=100.0)
    assert one_told.end is None
    assert decide(one_told, failed(KILLED), failed(KILLED), max_restart=0, now_seconds=100.1).end is End.FAILED
    assert decide(one_told, failed(KILLED), stuck, max_restart=0, now_seconds=105.1).end is End.FAILED, "but not for ever"


def test_an_ended_job_stays_as_it_ended() -> None:
    ended = job(end=End.SUCCEEDED)
    assert decide(ended, failed(KILLED), failed(KILLED)) == ended
    assert agreement.fail(ended, 1, "gone") == ended


def test_ranks_are_numbered_node_by_node_also_with_unequal_counts() -> None:
    assert [agreement.first_rank((2, 3, 1), node) for node in range(3)] == [0, 2, 5]


def test_a_lost_node_is_a_failure_that_is_tried_again() -> None:
    after = decide(job(), running(step=7), failed(LOST))
    assert (after.attempt, after.end, after.reason, after.tries.best_step) == (1, None, "node 1 is gone", 7)
    assert decide(job(), running(), failed(LOST), max_restart=0).sentence == "node 1 is gone"


def test_the_next_attempt_begins_after_its_pause_only() -> None:
    waiting = replace(job(port=None, attempt=1), not_before_seconds=105.0)
    ready = {node: NodeState(1, Phase.READY) for node in (0, 1)}
    assert not agreement.all_ready(waiting, ready, now_seconds=104.9)
    assert agreement.all_ready(waiting, ready, now_seconds=105.0)


def test_a_broken_connection_is_never_the_cause_beside_an_error() -> None:
    late = replace(RAISED, time_ns=BROKEN.time_ns + 1)
    assert decide(job(), failed(BROKEN), failed(late)).reason == late.elsewhere


def test_a_broken_connection_ends_the_job_only_once_a_node_that_is_away_had_time_to_be_lost() -> None:
    away = {1: "node 1 is gone"}
    first = decide(job(), failed(BROKEN), running(), max_restart=0, away=away)
    assert first.end is None
    assert decide(first, failed(BROKEN), failed(LOST), max_restart=0, now_seconds=105.0).sentence == "node 1 is gone"
    assert decide(first, failed(BROKEN), running(), max_restart=0, now_seconds=108.0, away=away).sentence == BROKEN.elsewhere


def test_a_restart_after_a_broken_connection_names_the_node_that_is_away() -> None:
    first = decide(job(), failed(BROKEN), running(), away={1: "node 1 is gone"})
    after = decide(first, failed(BROKEN), running(), now_seconds=101.0, away={1: "node 1 is gone"})
    assert (after.attempt, after.reason) == (1, "node 1 is gone")


def test_states_and_jobs_survive_the_text_they_are_sent_as() -> None:
    state = NodeState(2, Phase.FAILED, KILLED, stop_signal=15, all_wait=True, step=7)
    assert agreement.state_from_text(agreement.to_text(state)) == state
    told = job(end=End.FAILED, sentence="naïve", tries=Tries(1, 2, 3))
    assert agreement.job_from_text(agreement.to_text(told)) == told


def test_texts_of_other_nodes_cannot_move_the_cursor_or_fill_the_console() -> None:
    cause = replace(KILLED, elsewhere="rank 1 \x1b[2J\nfailed", here="x" * 10_000)
    read = agreement.state_from_text(agreement.to_text(failed(cause))).cause
    assert read is not None and read.elsewhere == r"rank 1 \x1b[2J\nfailed" and len(read.here) == agreement.TEXT_LETTERS


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": -1},
        {"attempt": True},
        {"attempt": "0"},
        {"phase": "asleep"},
        {"stop_signal": 9},
        {"all_wait": 1},
        {"step": 1.5},
        {"cause": 3},
        {"cause": {"here": "x"}},
        {"more": 1},
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    fields = json.loads(agreement.to_text(failed(KILLED)))
    with pytest.raises(ValueError, match="."):
        agreement.state_from_text(json.dumps({**fields, **change}).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0},
        {"port": "22"},
        {"end": "never"},
        {"process_counts": 3},
        {"stop_signal": 9},
        {"tries": {"spent": -1}},
        {"run_id": 1},
    ],
)
def test_a_job_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    fields = json.loads(agreement.to_text(job()))
    with pytest.raises(ValueError, match="."):
        agreement.job_from_text(json.dumps({**fields, **change}).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"nonsense", b"[" * 60_000])
def test_nonsense_is_refused(text: bytes) -> None:
    for parse in (agreement.state_from_text, agreement.job_from_text):
        with pytest.raises(ValueError, match="."):
            parse(text)
