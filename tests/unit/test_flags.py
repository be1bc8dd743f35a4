"""The flags of fleetrun: spellings, what each may hold, what is refused."""

from __future__ import annotations

import pytest

from fleetx.errors import ConfigError
from fleetx.launch.flags import FLAGS, PARAMETER_SERVER, make_parser, parse, split_env


def test_flags_after_the_script_are_the_scripts() -> None:
    options = parse(["--nproc-per-node=3", "train.py", "--gpus", "0", "--log_dir", "x", "--", "-m"])
    assert options.command == ["train.py", "--gpus", "0", "--log_dir", "x", "--", "-m"]
    assert (options.nproc_per_node, options.gpus, options.log_dir, options.module) == (3, None, "log", False)


def test_every_flag_has_both_spellings_and_is_known_to_the_hints() -> None:
    spellings = {spelling for action in make_parser()._actions for spelling in action.option_strings if spelling.startswith("--")}
    assert spellings == {*FLAGS, *("--" + flag[2:].replace("_", "-") for flag in FLAGS)}


def test_the_defaults_are_a_local_run_without_restarts() -> None:
    options = vars(parse(["train.py"]))
    assert {name for name, value in options.items() if value is None} == {
        *("gpus", "ips", "nnodes", "master", "rank", "host", "start_port", "run_mode", "job_secret_file")
    }
    assert (options["nproc_per_node"], options["max_restart"], options["hang_timeout"]) == ("auto", 0, 1800.0)
    assert (options["tee"], options["job_id"], options["log_overwrite"], options["dry_run"]) == ({0}, "default", False, False)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--devices", "0,1"], "gpus", "0,1"),
        (["--selected-gpus=2"], "gpus", "2"),
        (["--nproc_per_node", "gpu"], "nproc_per_node", "gpu"),
        (["--max_restarts", "3"], "max_restart", 3),
        (["--max-restart", "0"], "max_restart", 0),
        (["--hang-timeout", "0.5"], "hang_timeout", 0.5),
        (["--node-grace", "90"], "node_grace", 90.0),
        (["--restart_window=600"], "restart_window", 600.0),
        (["--warm-restart", "off"], "warm_restart", "off"),
        (["--job_secret_file", "job.secret"], "job_secret_file", "job.secret"),
        (["--tee", "all"], "tee", "all"),
        (["--tee", "none"], "tee", frozenset()),
        (["--tee", "0, 3"], "tee", {0, 3}),
        (["--start_port", "6170"], "start_port", 6170),
        (["--run_mode", "collective"], "run_mode", "collective"),
        (["--job_id", "run-7.b:1"], "job_id", "run-7.b:1"),
        (["--env", "A=1", "--env", "slurm"], "env", ["A=1", "slurm"]),
        (["--"], "command", ["train.py"]),
    ],
)
def test_each_flag_is_read(words: list[str], name: str, value: object) -> None:
    assert vars(parse([*words, "train.py"]))[name] == value


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc_per_node", "0"], "a whole number of at least 1, or auto, gpu or cpu, is needed, got '0'"),
        (["--nproc_per_node", "²"], "got '²'"),
        (["--nnodes", "2:4"], "at least 1 is needed, got '2:4'"),
        (["--rank", "-1"], "at least 0 is needed, got '-1'"),
        (["--max_restart", "often"], "got 'often'"),
        (["--warm_restart", "no"], "auto or off is needed, got 'no'"),
        (["--start_port", "80"], "1024 to 65535 is needed, got '80'"),
        (["--start_port", "65536"], "got '65536'"),
        (["--hang_timeout", "0"], "seconds above 0 is needed, got '0'"),
        (["--hang_timeout", "nan"], "got 'nan'"),
        (["--tee", "rank0"], "all, none, or ranks such as 0,3 are needed, got 'rank0'"),
        (["--tee", ""], "got ''"),
        (["--job_id", "a b"], "got 'a b'"),
        (["--run_mode", "ps"], "collective only, got 'ps'"),
        (["--elastic_level", "1"], "--elastic_level is not taken, .* --max_restart N"),
        (["--elastic-timeout=30"], "--elastic-timeout is not taken, .* --hang_timeout SECONDS"),
        (["--log_level", "INFO"], "--tee all"),
        (["--nnode", "2"], "unknown flag --nnode. Did you mean `--nnodes`?"),
        (["--max_restar=2"], "Did you mean `--max_restart`?"),
    ],
)
def test_misuse_is_one_sentence(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        parse([*words, "train.py"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("flag", PARAMETER_SERVER)
def test_flags_of_parameter_servers_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is for parameter-server training, and fleetrun is collective only"):
        parse([flag, "2", "train.py"])


def test_env_sets_variables_and_says_whose_variables_tell_of_the_nodes() -> None:
    assert split_env([]) == ({}, None)
    assert split_env(["A=1", "B=x=y", "local", "C="]) == ({"A": "1", "B": "x=y", "C": ""}, "local")


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (["kubernetes"], "NAME=VALUE, or one of local, slurm and mpi; got 'kubernetes'"),
        (["slurm", "mpi"], "got 'mpi'"),
        (["=1"], "does not name a variable"),
        (["A B=1"], "does not name a variable"),
        (["RANK=3"], "fleetrun gives each rank its own"),
        (["TORCHELASTIC_RUN_ID=x"], "gives each rank its own"),
        (["CUDA_VISIBLE_DEVICES=0"], "choose GPUs with --gpus"),
    ],
)
def test_other_env_entries_are_refused(entries: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        split_env(entries)
