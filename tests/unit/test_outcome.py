"""How a run ended: who is to blame, the exit code, and the box that tells it."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from fleetx.launch.outcome import (
    Failure,
    FailureContext,
    Outcome,
    by_blame,
    count_kills,
    counter_files,
    describe_exit,
    explain_signal,
    failure_box,
    join_ranks,
    parse_kills,
    stop_line,
)

CONTEXT = FailureContext(Path("log/workerlog.1"), node=0, device="gpu:1")
RAISED = Failure(1, 1, 1, "ValueError: no such sample", "train.py:7, in train")


def box(*failures: Failure, context: FailureContext = CONTEXT, **others: object) -> list[str]:
    """The lines inside the frame, after checking the frame."""
    top, *lines, bottom = failure_box(Outcome(failures, **others), context).splitlines()  # type: ignore[arg-type]
    assert len(lines) + 2 <= 15
    assert {len(line) for line in (top, *lines, bottom)} == {len(top)} and len(top) <= 100
    assert top == bottom == f"+{'-' * (len(top) - 2)}+"
    return [line[2:-2].rstrip() for line in lines]


def test_the_first_exception_is_to_blame_not_the_broken_connections_after_it() -> None:
    late, first = Failure(0, 1, time_ns=200), Failure(1, 1, time_ns=100)
    assert [failure.rank for failure in by_blame([late, first])] == [1, 0]


def test_a_killed_rank_is_to_blame_before_its_peers_exceptions() -> None:
    raised, killed = Failure(0, 1, time_ns=100), Failure(1, -9, time_ns=200)
    assert by_blame([raised, killed])[0].rank == 1


def test_ranks_stopped_by_the_launcher_are_never_to_blame() -> None:
    terminated, raised = Failure(0, -15, time_ns=1), Failure(1, 3, time_ns=100)
    assert by_blame([terminated, raised])[0].rank == 1


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(), 0),
        (Outcome((Failure(1, 3, 1), Failure(0, -15, 1))), 3),
        (Outcome((Failure(1, -9, 1),)), 137),
        (Outcome(stopped_by=signal.SIGINT), 130),
        (Outcome(stopped_by=signal.SIGTERM), 143),
        (Outcome(stopped_by=signal.SIGUSR1), 143),
        (Outcome(stopped_by=signal.SIGHUP), 129),
        (Outcome(elsewhere="rank 3 on node 1 failed."), 1),
        (Outcome((Failure(0, -9, 1),), elsewhere="rank 3 on node 1 failed.", elsewhere_exit_code=-11), 139),
    ],
)
def test_the_exit_code_is_that_of_the_cause(outcome: Outcome, code: int) -> None:
    assert outcome.exit_code == code


def test_exits_are_told_by_the_signals_name() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-11) == "killed by SIGSEGV (exit code 139)"
    assert describe_exit(-41) == "killed by signal 41 (exit code 169)"


@pytest.mark.parametrize(
    ("exit_code", "before", "after", "told"),
    [
        (-9, None, None, "Often the kernel's out-of-memory killer"),
        (-9, 2, None, "Often the kernel's out-of-memory killer"),
        (-9, 2, 3, "Out of memory: the kernel's count of oom_kill rose from 2 to 3"),
        (-9, 2, 2, "Another process sent it"),
        (-6, 0, 0, "NCCL timeout"),
        (-7, 0, 0, "/dev/shm"),
        (-11, 0, 0, "compiled code"),
    ],
)
def test_a_signal_is_explained(exit_code: int, before: int | None, after: int | None, told: str) -> None:
    assert told in (explain_signal(exit_code, oom_kills_before=before, oom_kills_after=after) or "")


def test_other_ends_need_no_explanation() -> None:
    assert explain_signal(1, oom_kills_before=0, oom_kills_after=1) is None
    assert explain_signal(-41, oom_kills_before=0, oom_kills_after=1) is None


def test_an_exception_is_told_with_its_place_its_step_and_its_peers() -> None:
    others = [Failure(rank, -15, 1) for rank in (0, 2, 3, 5)]
    assert box(dataclasses.replace(RAISED, step=812), *others) == [
        "fleetrun: rank 1 (node 0, gpu:1) failed first: exit code 1",
        "ValueError: no such sample",
        "at train.py:7, in train, in step 812",
        "then ended: ranks 0, 2-3, 5",
        "log: log/workerlog.1",
    ]


def test_a_killed_rank_is_told_with_its_last_lines_and_the_restarts_made() -> None:
    context = dataclasses.replace(CONTEXT, log_tail=["loading", "x" * 500], max_restart=3, oom_kills_before=0, oom_kills_after=1)
    context = dataclasses.replace(context, memory_bytes=8 << 30, process_count=4)
    first, *explained, step, last, loading, long, restarts, log = box(Failure(1, -9, 1, step=4), context=context, restarts=3)
    assert first == "fleetrun: rank 1 (node 0, gpu:1) failed: killed by SIGKILL (exit code 137)"
    told = " ".join(line.strip() for line in explained)
    assert "oom_kill rose from 0 to 1. 4 ranks share 8 GiB. What makes room: strategy.recompute" in told
    assert told.count('"1638MiB"') == 2, "four fifths of the share of a rank"
    assert (step, last, loading) == ("in step 4", "its last lines:", "  | loading")
    assert long.startswith("  | xxx") and long.endswith("x ...")
    assert (restarts, log) == ("restarts made: 3 of 3", "log: log/workerlog.1")


def test_an_error_for_want_of_memory_is_told_with_what_would_fit() -> None:
    error, advice = "OutOfMemoryError: CUDA out of memory.\n" * 9, "cuda:0 has 32 GiB. " * 90
    told = box(dataclasses.replace(RAISED, error=error, advice=advice))
    assert told[1].startswith("OutOfMemoryError") and sum("cuda:0 has 32 GiB" in line for line in told) == 6
    assert told[-1] == "log: log/workerlog.1"


def test_a_hung_rank_is_told_by_how_it_hung() -> None:
    hung = Failure(1, -9, 1, step=7, hung="silent for 12 s in backward")
    assert box(hung, Failure(0, -9, 1))[:2] == [
        "fleetrun: rank 1 (node 0, gpu:1) hung: silent for 12 s in backward (killed, exit code 137)",
        "in step 7",
    ]


def test_the_stack_of_a_hung_rank_is_told_from_its_innermost_call_on() -> None:
    context = dataclasses.replace(CONTEXT, log_tail=[f"  File a.py, line {line}" for line in range(40)], is_stack=True)
    told = box(Failure(1, -9, 1, hung="stopped (SIGSTOP)"), context=context)
    assert told[1:3] == ["where it was, the innermost call first:", "  |   File a.py, line 0"]


def test_ranks_that_had_ended_well_are_named_since_others_may_have_waited_for_them() -> None:
    assert box(RAISED, ended_before=(0, 2))[3:] == ["ended before, with exit code 0: ranks 0, 2", "log: log/workerlog.1"]


def test_a_message_of_several_lines_is_cut_sensibly() -> None:
    three = dataclasses.replace(RAISED, error="RuntimeError: size mismatch:\n\n\tmissing key a\n\tmissing key b")
    assert box(three)[1:4] == ["RuntimeError: size mismatch:", "missing key a", "missing key b"]
    many = dataclasses.replace(RAISED, error="\n".join(f"line {number} " + "word " * 30 for number in range(50)))
    lines = box(many)
    assert lines[1].startswith("line 0 word") and lines[8] == "..." and lines[9] == "at train.py:7, in train"


def test_a_failure_elsewhere_is_the_cause_and_ranks_here_are_its_victims() -> None:
    context = FailureContext(Path("log"), node=0)
    told = box(Failure(0, 1, 1), Failure(1, 1, 1), context=context, elsewhere="rank 3 on node 1 (10.0.0.2) failed: exit code 1.")
    assert told == ["fleetrun: rank 3 on node 1 (10.0.0.2) failed: exit code 1.", "then ended: ranks 0-1", "log: log"]
    assert box(context=context, elsewhere="node 1 (10.0.0.2) is gone.") == ["fleetrun: node 1 (10.0.0.2) is gone.", "log: log"]


@pytest.mark.parametrize("text", ["", "x" * 5000, "word " * 2000, "a\nb\n" * 500, "\x1b[2J\r\n\x00" * 300, "字" * 40])
def test_the_box_holds_whatever_was_said(text: str) -> None:
    context = FailureContext(
        Path(text.replace("\n", "").replace("\0", "")[:300] or "x"), [text] * 100, 0, text[:200], max_restart=3
    )
    failures = [Failure(rank, -9 if rank else 1, rank, text, text, 10**9) for rank in range(0, 1024, 2)]
    for first in (failures[0], dataclasses.replace(failures[0], error=None), dataclasses.replace(failures[0], hung=text)):
        assert "\x1b" not in "".join(box(first, *failures[1:], context=context))


def test_ranks_are_joined_into_spans() -> None:
    assert join_ranks([3]) == "rank 3"
    assert join_ranks([7, 0, 2, 3, 4, 4]) == "ranks 0, 2-4, 7"


def test_a_stop_is_one_line() -> None:
    assert stop_line(Outcome(stopped_by=signal.SIGTERM)) == "fleetrun: stopped by SIGTERM"
    assert stop_line(Outcome(stopped_by=signal.SIGINT, stopped_at="x.py:6, in <module>")).endswith(
        "; rank 0 was at x.py:6, in <module>"
    )


def test_the_kernels_counter_is_found_in_either_version_of_control_groups(tmp_path: Path) -> None:
    assert parse_kills("low 0\noom 3\noom_kill 2\noom_group_kill 9\n") == 2
    assert parse_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n") == 5
    assert parse_kills("") is None
    root = Path("/cg")
    assert counter_files("0::/job/step\n", root) == [root / "job/step/memory.events", root / "memory.events"]
    assert counter_files("7:cpu,cpuacct:/a\n4:memory:/b\n", root)[0] == root / "memory/b/memory.oom_control"
    (tmp_path / "events").write_text("oom_kill 4\n")
    assert count_kills([tmp_path / "missing", tmp_path / "events"]) == 4
    assert count_kills([tmp_path / "missing"]) is None


def test_a_rank_that_lost_its_connection_is_never_to_blame_beside_another() -> None:
    broken = Failure(0, 1, time_ns=1, is_consequence=True)
    for cause in (Failure(1, 7, time_ns=2), Failure(1, -15, time_ns=2), Failure(1, -6, time_ns=2)):
        assert by_blame([broken, cause])[0] is cause
