"""Who hangs, from made-up sightings: no process, no clock."""

from __future__ import annotations

import psutil
import pytest

from fleetx.dist.heartbeat import Phase, Progress
from fleetx.launch import hang
from fleetx.launch.hang import Sighting, Watched

LIMIT = 10.0


def watched(
    phase: Phase | None = Phase.SCRIPT, *, step: int = 7, silent: float = 0.0, stopped: float = 0.0, blocked: float = 0.0
) -> Watched:
    progress = Progress(step, phase, since_ns=1) if phase is not None else None
    return Watched(Sighting(progress, psutil.STATUS_RUNNING), silent, stopped, blocked)


def judge(*ranks: Watched, is_only_node: bool = True, limit: float = LIMIT) -> hang.Hang | None:
    return hang.judge(dict(enumerate(ranks)), hang_timeout_seconds=limit, is_only_node=is_only_node)


def test_a_stopped_rank_is_named_after_three_seconds_whatever_the_limit() -> None:
    assert judge(watched(), watched(stopped=2.9)) is None
    verdict = judge(watched(Phase.WAIT), watched(stopped=3.0))
    assert verdict == hang.Hang({1: "stopped (SIGSTOP)"}, waiting=(0,))


def test_a_limit_below_three_seconds_holds_for_stopped_ranks_too() -> None:
    assert judge(watched(stopped=1.0), limit=1.0) == hang.Hang({0: "stopped (SIGSTOP)"})


def test_a_rank_silent_in_the_script_is_the_cause_and_those_in_a_collective_its_victims() -> None:
    ranks = {0: watched(Phase.WAIT, silent=12), 1: watched(silent=12, step=812), 2: watched(Phase.WAIT, silent=12)}
    verdict = hang.judge(ranks, hang_timeout_seconds=LIMIT, is_only_node=True)
    assert verdict == hang.Hang({1: "silent for 12 s in the user's code"}, waiting=(0, 2))
    assert hang.describe(verdict, ranks) == [
        "rank 1 hangs: silent for 12 s in the user's code, at step 812; ranks 0, 2 wait for it"
    ]


def cautioned(*ranks: Watched, limit: float = 1800.0) -> hang.Hang | None:
    return hang.caution(dict(enumerate(ranks)), hang_timeout_seconds=limit)


def test_a_rank_that_others_wait_for_is_told_after_a_minute_long_before_it_counts_as_a_hang() -> None:
    ranks = {0: watched(Phase.WAIT, silent=60), 1: watched(silent=61, step=6)}
    seen = hang.caution(ranks, hang_timeout_seconds=1800.0)
    assert seen is not None
    assert hang.describe_caution(seen, ranks, hang_timeout_seconds=1800.0) == (
        "rank 1: silent for 61 s in the user's code, at step 6; rank 0 waits for it; "
        "after 1800 s that counts as a hang (--hang_timeout)"
    )


def test_no_caution_where_a_rank_moves_or_none_waits_or_the_limit_is_as_near() -> None:
    late, waiting = watched(silent=61), watched(Phase.WAIT, silent=61)
    assert cautioned(waiting, late) is not None
    assert cautioned(watched(Phase.WAIT, silent=59), late) is None
    assert cautioned(late, late) is None, "one rank alone, or all in long code of their own"
    assert cautioned(waiting, waiting) is None, "what they wait for may be on another node"
    assert cautioned(waiting, late, limit=60.0) is None


def test_no_rank_hangs_while_one_rank_still_moves() -> None:
    assert judge(watched(Phase.WAIT, silent=99), watched(Phase.SAVE, silent=9.9)) is None


def test_ranks_that_all_wait_are_all_named() -> None:
    verdict = judge(watched(Phase.WAIT, silent=10), watched(Phase.WAIT, silent=11))
    assert verdict == hang.Hang({0: "silent for 10 s in a collective", 1: "silent for 11 s in a collective"})


def test_with_other_nodes_ranks_that_all_wait_are_not_blamed_here() -> None:
    waiting = (watched(Phase.WAIT, silent=10), watched(Phase.WAIT, silent=11))
    assert judge(*waiting, is_only_node=False) is None
    assert hang.all_wait(dict(enumerate(waiting)), hang_timeout_seconds=LIMIT)
    assert list(hang.blame_all(dict(enumerate(waiting))).culprits) == [0, 1]
    assert judge(waiting[0], watched(Phase.BACKWARD, silent=10), is_only_node=False) is not None


def test_without_any_record_there_is_no_verdict() -> None:
    assert judge(watched(None, silent=999), watched(None, silent=999)) is None


def test_before_the_first_step_only_a_rank_that_others_wait_for_can_hang() -> None:
    assert judge(watched(step=0, silent=99), watched(step=0, silent=99)) is None
    verdict = judge(watched(Phase.WAIT, step=0, silent=99), watched(None, silent=99))
    assert verdict == hang.Hang({1: "it never reported progress"}, waiting=(0,))


def test_a_rank_that_sleeps_in_the_kernel_for_the_limit_hangs() -> None:
    assert judge(watched(None, blocked=9.0)) is None
    assert judge(watched(None, blocked=10.0)) == hang.Hang({0: "in uninterruptible sleep for 10 s"})


def test_silence_and_stops_are_counted_from_look_to_look() -> None:
    record = Progress(3, Phase.SCRIPT, since_ns=5)
    seen = hang.observe(None, Sighting(record, psutil.STATUS_STOPPED), 0.5)
    for _ in range(4):
        seen = hang.observe(seen, Sighting(record, psutil.STATUS_STOPPED), 0.5)
    assert (seen.silent_seconds, seen.stopped_seconds) == (2.0, 2.0)
    resumed = hang.observe(seen, Sighting(record, psutil.STATUS_SLEEPING), 0.5)
    assert (resumed.silent_seconds, resumed.stopped_seconds) == (2.5, 0.0)
    moved = hang.observe(resumed, Sighting(Progress(4, Phase.SCRIPT, since_ns=6), psutil.STATUS_SLEEPING), 0.5)
    assert moved.silent_seconds == 0.0


def test_hours_in_which_the_launcher_itself_was_suspended_do_not_count() -> None:
    record = Progress(3, Phase.SCRIPT, since_ns=5)
    seen = hang.observe(Watched(Sighting(record, psutil.STATUS_SLEEPING)), Sighting(record, psutil.STATUS_SLEEPING), 7200.0)
    assert seen.silent_seconds == hang.GAP_SECONDS


@pytest.mark.parametrize("status", [psutil.STATUS_TRACING_STOP, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING])
def test_a_rank_under_a_debugger_is_not_stopped(status: str) -> None:
    before = Watched(Sighting(None, status))
    assert hang.observe(before, Sighting(None, status), 1.0).stopped_seconds == 0.0


def test_of_many_culprits_the_first_few_are_shown() -> None:
    ranks = {rank: watched(Phase.WAIT, silent=10) for rank in range(64)}
    lines = hang.describe(hang.blame_all(ranks), ranks)
    assert len(lines) == 5 and lines[-1] == "and 60 more ranks like these"
