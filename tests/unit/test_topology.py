"""Who runs where, and the tables that say so: the launcher's decisions, without a process."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Literal

import pytest

from fleetx.errors import ConfigError
from fleetx.launch import topology
from fleetx.launch.tables import configuration_table, dry_run_text, environment_table, start_line


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
    [
        ("auto", (), 0, 2),
        ("auto", (), 8, 8),
        ("auto", (0, 3), 8, 2),
        ("gpu", (0, 3), 8, 2),
        ("gpu", (), 8, 8),
        ("cpu", (), 8, 6),
        (1, (0, 3), 8, 1),
        (5, (), 0, 5),
    ],
)
def test_one_process_for_each_gpu_and_two_without(
    requested: int | Literal["auto", "gpu", "cpu"], gpus: tuple[int, ...], visible: int, expected: int
) -> None:
    assert topology.count_processes(requested, gpus=gpus, visible_gpus=visible, cores=6) == expected


def test_a_rank_for_each_gpu_needs_gpus_and_one_for_each_core_needs_none() -> None:
    with pytest.raises(ConfigError, match="sees no GPU here. Write a number, or cpu"):
        topology.count_processes("gpu", gpus=(), visible_gpus=0, cores=6)
    with pytest.raises(ConfigError, match="keep one of them"):
        topology.count_processes("cpu", gpus=(0,), visible_gpus=1, cores=6)


def test_ranks_beyond_the_number_of_gpus_share_them_in_turn() -> None:
    assert topology.assign_devices(3, gpus=(4, 6), visible_gpus=8) == ("gpu:4", "gpu:6", "gpu:4")
    assert topology.assign_devices(2, gpus=(), visible_gpus=2) == ("gpu:0", "gpu:1")
    assert topology.assign_devices(2, gpus=(), visible_gpus=0) == ("cpu", "cpu")


def test_only_logs_of_ranks_that_are_gone_are_stale() -> None:
    present = [Path(f"log/workerlog.{name}") for name in ("0", "1", "2", "11", "1.gz", "x", "²")]
    assert topology.stale_logs(present, world_size=2) == [Path("log/workerlog.2"), Path("log/workerlog.11")]


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


def test_gpus_are_hidden_from_ranks_that_run_on_the_cpu_beside_them() -> None:
    assert environment(0, make_plan(hides_gpus=True))["CUDA_VISIBLE_DEVICES"] == ""


def test_variables_of_the_user_reach_every_rank_and_beat_our_own_defaults() -> None:
    plan = make_plan(variables={"OMP_NUM_THREADS": "7", "MODE": "a=b"})
    assert [environment(rank, plan)["MODE"] for rank in (0, 1)] == ["a=b", "a=b"]
    assert environment(0, plan)["OMP_NUM_THREADS"] == "7"


def test_the_ranks_of_a_node_follow_those_of_the_nodes_before() -> None:
    plan = make_plan(nodes=topology.Nodes(3, 2, "10.0.0.3", "10.0.0.1", 6070))
    assert topology.expected_assignment(plan, 1)["RANK"] == "5"
    assert topology.expected_assignment(plan, 1)["WORLD_SIZE"] == "6"
    assert topology.expected_assignment(make_plan(nodes=topology.Nodes(3, None)), 0)["RANK"] == "2"


def test_the_table_is_a_rectangle_and_keeps_the_end_of_a_long_value() -> None:
    shown = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"}
    table = environment_table({**dict.fromkeys(shown, "1"), "MASTER_ADDR": "a" * 60 + "end"})
    assert len({len(line) for line in table.splitlines()}) == 1
    assert "... aaa" in table and "aend" in table


def test_the_configuration_shows_every_setting_and_no_secret() -> None:
    plan = make_plan(
        nodes=topology.Nodes(2, None, "10.0.0.2", "10.0.0.1", 6070),
        variables={"HF_TOKEN": "hf_abc", "api_key": "sk1", "DB_PASSWORD": "pw1", "MY_SECRET": "s1", "MODE": "fast\x1b[2J"},
        max_restart=3,
        hang_timeout_seconds=90.0,
        tee=frozenset({3, 0}),
    )
    table = configuration_table(plan)
    for row in (
        *(
            "nnodes: 2",
            "rank: in order of arrival",
            "master: 10.0.0.1, port 6070",
            "host: 10.0.0.2",
            "max_restart: 3",
            "tee: 0,3",
        ),
        *("hang_timeout: 90 s", "job_id: default", "log_overwrite: False", "script: train.py --lr 0.1", "devices: cpu,cpu"),
    ):
        assert f"\n{row}\n" in table
    assert "HF_TOKEN=*** api_key=*** DB_PASSWORD=*** MY_SECRET=*** MODE=fast\\x1b[2J" in table
    assert not any(secret in table for secret in ("hf_abc", "sk1", "pw1", "s1"))


def test_a_dry_run_shows_ranks_devices_logs_variables_and_the_command() -> None:
    plan = make_plan(
        arguments=("--name", "a b", "$HOME"),
        devices=("gpu:0", "gpu:1"),
        nodes=topology.Nodes(2, 1, "10.0.0.2", "10.0.0.1", 6070),
        variables={"API_TOKEN": "hidden1"},
    )
    text = dry_run_text(plan, executable="/usr/bin/python3", shim=Path("/x/worker.py"), inherited={}, cores=4)
    assert "this is node 1 of 2, at 10.0.0.2; node 0 listens on 10.0.0.1, port 6070" in text
    assert "     2  gpu:0     log/workerlog.2\n     3  gpu:1     log/workerlog.3\n" in text
    assert "  /usr/bin/python3 /x/worker.py script train.py --name 'a b' '$HOME'\n" in text
    for name in ("RANK", "MASTER_PORT", "OMP_NUM_THREADS", "FLEETX_WORKER_LOG", "API_TOKEN"):
        assert f" {name} " in text
    assert "hidden1" not in text


def test_a_dry_run_says_when_the_rank_is_given_on_arrival() -> None:
    plan = make_plan(nodes=topology.Nodes(2, None, "10.0.0.2", "10.0.0.1", 6070))
    text = dry_run_text(plan, executable="python", shim=Path("worker.py"), inherited={}, cores=4)
    assert "gets its number of 2 on arrival; shown as if it were node 1" in text


def test_the_start_line_says_where_output_goes() -> None:
    alone = "Local start of 2 processes. Rank N writes to log/workerlog.N; shown here: "
    assert start_line(make_plan(), range(2), 0) == alone + "rank 0, and of others their warnings and tracebacks."
    assert start_line(make_plan(tee="all"), range(2), 0) == alone + "all ranks."
    assert start_line(make_plan(tee=frozenset()), range(2), 0) == alone + "warnings and tracebacks."
    second = start_line(make_plan(nodes=topology.Nodes(2, 1)), range(2, 4), 1)
    assert second.startswith("Start of ranks 2-3 on node 1 of 2. Rank N writes to log/workerlog.N; ")


def test_a_rank_that_is_not_there_cannot_be_shown() -> None:
    topology.check_tee("all", world_size=1)
    topology.check_tee(frozenset(), world_size=1)
    topology.check_tee(frozenset({0, 1}), world_size=2)
    with pytest.raises(ConfigError, match="--tee names rank 2, but the ranks are numbered 0 to 1"):
        topology.check_tee(frozenset({0, 2}), world_size=2)
