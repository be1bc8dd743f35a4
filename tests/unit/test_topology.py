"""Who runs where, and who is to blame: the launcher's decisions, without a process."""

from __future__ import annotations

import signal
import string
from pathlib import Path

import pytest

from fleetx.errors import ConfigError
from fleetx.launch import topology
from fleetx.launch.fleetrun import environment_table, parse
from fleetx.launch.outcome import Failure, Outcome, by_blame, describe_exit, failure_lines


def make_plan(**changes: object) -> topology.Plan:
    settings: dict[str, object] = {
        "target": "train.py",
        "is_module": False,
        "arguments": ("--lr", "0.1"),
        "process_count": 2,
        "gpus": (),
        "devices": ("cpu", "cpu"),
        "log_dir": Path("log"),
    }
    return topology.Plan(**{**settings, **changes})  # type: ignore[arg-type]


def environment(
    rank: int, plan: topology.Plan, *, inherited: dict[str, str] | None = None, terminal: str | None = None
) -> dict[str, str]:
    assigned = {"RANK": str(rank), "WORLD_SIZE": "2"}
    return topology.worker_environment(assigned, plan, inherited=inherited or {}, cores=9, terminal=terminal)


def test_gpus_are_parsed_in_the_order_given() -> None:
    assert topology.parse_gpus("3, 1") == (3, 1)


@pytest.mark.parametrize("text", ["", "0,", "a", "-1", "0;1", "1.5", "²"])
def test_gpus_that_are_no_numbers_are_refused_with_the_text_given(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 0,1") as refused:
        topology.parse_gpus(text)
    assert repr(text) in str(refused.value)


def test_a_gpu_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        topology.parse_gpus("0,0")


def test_gpus_are_refused_on_a_machine_without() -> None:
    with pytest.raises(ConfigError, match="sees no GPU"):
        topology.check_gpus((0,), visible_gpus=0, visible_devices=None)


def test_a_gpu_beyond_the_last_is_refused() -> None:
    topology.check_gpus((0, 1), visible_gpus=2, visible_devices=None)
    with pytest.raises(ConfigError, match=r"GPU 2, 7, .* torch sees 2"):
        topology.check_gpus((1, 2, 7), visible_gpus=2, visible_devices=None)


def test_cuda_visible_devices_bounds_the_choice_of_gpus() -> None:
    topology.check_gpus((5,), visible_gpus=2, visible_devices="4,5")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is 4,5"):
        topology.check_gpus((0,), visible_gpus=2, visible_devices="4,5")


@pytest.mark.parametrize(
    ("requested", "gpus", "visible", "expected"),
    [(None, (), 0, 2), (None, (), 8, 8), (None, (0, 3), 8, 2), (1, (0, 3), 8, 1), (5, (), 0, 5)],
)
def test_one_process_for_each_gpu_and_two_without(
    requested: int | None, gpus: tuple[int, ...], visible: int, expected: int
) -> None:
    assert topology.count_processes(requested, gpus=gpus, visible_gpus=visible) == expected


def test_ranks_beyond_the_number_of_gpus_share_them_in_turn() -> None:
    assert topology.assign_devices(3, gpus=(4, 6), visible_gpus=8) == ("gpu:4", "gpu:6", "gpu:4")
    assert topology.assign_devices(2, gpus=(), visible_gpus=2) == ("gpu:0", "gpu:1")
    assert topology.assign_devices(2, gpus=(), visible_gpus=0) == ("cpu", "cpu")


def test_only_logs_of_ranks_that_are_gone_are_stale() -> None:
    present = [Path(f"log/workerlog.{name}") for name in ("0", "1", "2", "11", "1.gz", "x")]
    assert topology.stale_logs(present, range(2)) == [Path("log/workerlog.2"), Path("log/workerlog.11")]


def test_arguments_survive_the_template_that_elastic_makes_of_them() -> None:
    arguments = ("$$", "${local_rank}", "$HOME", "a b")
    passed = topology.shim_arguments(Path("worker.py"), make_plan(arguments=arguments))
    expanded = tuple(string.Template(word).safe_substitute(local_rank="7") for word in passed)
    assert expanded == ("worker.py", "script", "train.py", *arguments)


def test_the_environment_names_rank_log_and_threads() -> None:
    added = environment(1, make_plan())
    assert added["PADDLE_TRAINER_ID"] == "1"
    assert added["PADDLE_TRAINERS_NUM"] == "2"
    assert added["PYTHONUNBUFFERED"] == "1"
    assert added["OMP_NUM_THREADS"] == "4"
    assert added["FLEETX_WORKER_LOG"] == str(Path.cwd() / "log" / "workerlog.1")
    assert "CUDA_VISIBLE_DEVICES" not in added


def test_a_thread_count_that_is_set_is_kept_and_never_below_one() -> None:
    assert "OMP_NUM_THREADS" not in environment(0, make_plan(), inherited={"OMP_NUM_THREADS": "3"})
    assert environment(0, make_plan(process_count=64))["OMP_NUM_THREADS"] == "1"


def test_every_rank_sees_all_chosen_gpus() -> None:
    plan = make_plan(gpus=(3, 1))
    assert [environment(rank, plan)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["3,1", "3,1"]


def test_only_rank_0_is_given_the_terminal() -> None:
    assert environment(0, make_plan(), terminal="/dev/pts/3")["FLEETX_TTY"] == "/dev/pts/3"
    assert "FLEETX_TTY" not in environment(1, make_plan(), terminal="/dev/pts/3")
    assert "FLEETX_TTY" not in environment(0, make_plan())


def test_flags_after_the_script_are_the_scripts() -> None:
    options = parse(["--nproc-per-node=3", "train.py", "--gpus", "0", "--log_dir", "x", "--", "-m"])
    assert options.command == ["train.py", "--gpus", "0", "--log_dir", "x", "--", "-m"]
    assert (options.nproc_per_node, options.gpus, options.log_dir, options.module) == (3, None, "log", False)


def test_the_first_exception_is_to_blame_not_the_broken_connections_after_it() -> None:
    late, first = Failure(0, 1, seen_at=9, time_ns=200), Failure(1, 1, seen_at=9, time_ns=100)
    assert [failure.rank for failure in by_blame([late, first])] == [1, 0]


def test_a_killed_rank_is_to_blame_before_its_peers_exceptions() -> None:
    raised, killed = Failure(0, 1, seen_at=9, time_ns=100), Failure(1, -9, seen_at=9, time_ns=200)
    assert by_blame([raised, killed])[0].rank == 1


def test_ranks_stopped_by_the_launcher_are_never_to_blame() -> None:
    terminated, raised = Failure(0, -15, seen_at=9, time_ns=1), Failure(1, 3, seen_at=9, time_ns=100)
    killed_after_waiting = Failure(2, -9, seen_at=39, time_ns=2)
    assert by_blame([terminated, raised, killed_after_waiting])[0].rank == 1


def test_the_exit_code_is_the_blamed_ranks() -> None:
    assert Outcome().exit_code == 0
    assert Outcome((Failure(1, 3, 9, 1), Failure(0, -15, 9, 1))).exit_code == 3
    assert Outcome((Failure(1, -9, 9, 1),)).exit_code == 137
    assert Outcome(stopped_by=signal.SIGINT).exit_code == 130


def test_exits_are_told_by_the_signals_name() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert "out-of-memory" in describe_exit(-9)
    assert describe_exit(-41) == "killed by signal 41"


def test_a_failure_takes_at_most_15_lines_however_much_was_logged() -> None:
    ended = Outcome(tuple(Failure(rank, 1, 9, rank, "ValueError: boom", "train.py:3, in main") for rank in range(512)))
    lines = failure_lines(ended, log=Path("log/workerlog.0"), log_tail=["x" * 1000] * 100)
    assert len(lines) <= 15
    assert max(len(line) for line in lines) < 300
    assert "rank 0" in lines[0] and "ValueError: boom" in lines[1] and "log/workerlog.0" in lines[-1]


def test_the_table_is_a_rectangle_and_keeps_the_end_of_a_long_value() -> None:
    shown = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"}
    table = environment_table({**dict.fromkeys(shown, "1"), "MASTER_ADDR": "a" * 60 + "end"})
    assert len({len(line) for line in table.splitlines()}) == 1
    assert "... aaa" in table and "aend" in table
