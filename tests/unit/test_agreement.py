"""What follows from how the nodes stand: node 0's decisions, without a network."""

from __future__ import annotations

import signal
from dataclasses import replace

from fleetx.launch import agreement
from fleetx.launch.agreement import Cause, End, Job, NodeState, Phase
from fleetx.launch.control import Hello, assign_rank, mismatch

KILLED = Cause("rank 1 was killed", "rank 1 on node 0 failed: killed", -9, time_ns=20, is_crash=True, is_retryable=True)
RAISED = Cause("rank 3 failed", "rank 3 on node 1 failed: reset", 1, time_ns=10, is_crash=False, is_retryable=True)
HELLO = Hello(job_id="a", node_count=3, max_restart=0, process_count=2, address="10.0.0.1", rank=0)


def job(nodes: int = 2, *, port: int | None = 4000, **changes: object) -> Job:
    return replace(Job(process_counts=(2,) * nodes, port=port), **changes)  # type: ignore[arg-type]


def decide(before: Job, *states: NodeState, max_restart: int = 3, now_seconds: float = 100.0) -> Job:
    return agreement.decide(before, dict(enumerate(states)), max_restart=max_restart, now_seconds=now_seconds)


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
    after = decide(job(attempt=3), failed(KILLED, attempt=3), running(3))
    assert (after.end, after.sentence, after.exit_code, after.blamed_node) == (End.FAILED, KILLED.elsewhere, -9, 0)


def test_what_cannot_mend_is_not_tried_again() -> None:
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
    assert decide(job(), stuck, NodeState(0, Phase.DONE)).all_hang, "nobody there will come any more"


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


def test_states_and_jobs_survive_the_line_they_are_sent_as() -> None:
    state = NodeState(2, Phase.FAILED, KILLED, stop_signal=15, all_wait=True)
    assert agreement.state_from_line(agreement.to_line(state)) == state
    told = job(end=End.FAILED, sentence="naïve\nline")
    assert agreement.to_line(told).count(b"\n") == 1
    assert agreement.job_from_line(agreement.to_line(told)) == told


def test_nodes_started_differently_are_told_which_flag_differs() -> None:
    assert mismatch(HELLO, replace(HELLO, rank=1, address="10.0.0.2", process_count=8)) is None
    assert "--job_id b, node 0 has a" in (mismatch(HELLO, replace(HELLO, job_id="b")) or "")
    assert "--nnodes 2, node 0 has 3" in (mismatch(HELLO, replace(HELLO, node_count=2)) or "")
    assert "--max_restart 1" in (mismatch(HELLO, replace(HELLO, max_restart=1)) or "")


def test_places_are_given_by_rank_or_in_order_of_arrival() -> None:
    someone = replace(HELLO, rank=None, address="10.0.0.9")
    assert assign_rank({0: HELLO}, replace(HELLO, rank=2)) == 2
    assert assign_rank({0: HELLO, 1: HELLO}, someone) == 2
    assert "no place for 10.0.0.9" in str(assign_rank({0: HELLO, 1: HELLO, 2: HELLO}, someone))
    assert "both have rank 0" in str(assign_rank({0: HELLO}, replace(someone, rank=0)))
    assert "ranks are 0 to 2" in str(assign_rank({0: HELLO}, replace(someone, rank=3)))
