"""Ranks from launchers' variables, each tested with the variables the launcher sets."""

from __future__ import annotations

import pytest

from fleetx.errors import ConfigError
from fleetx.roles import ALONE, first_host, job_port, role_from_env, role_in_group

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GROUP_WORLD_SIZE": "4",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "job-17",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[003-004]", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0",
}  # fmt: skip


def test_without_variables_a_process_is_alone() -> None:
    assert role_from_env({"PATH": "/bin"}) == ALONE


def test_torchrun() -> None:
    role = role_from_env(TORCHRUN)
    assert (role.rank, role.size, role.local_rank, role.local_size, role.node_num) == (3, 8, 1, 2, 4)
    assert (role.address, role.port, role.source) == ("10.0.0.1", 29500, "torchrun")


def test_openmpi_on_one_node_needs_no_address() -> None:
    role = role_from_env(OPENMPI)
    assert (role.rank, role.size, role.local_rank, role.address) == (1, 4, 1, "127.0.0.1")
    assert role.port == job_port("job-17")


def test_openmpi_on_several_nodes_asks_for_the_address_by_name() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set, but mpirun on several nodes is"):
        role_from_env(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_slurm() -> None:
    role = role_from_env(SLURM)
    assert (role.rank, role.size, role.local_rank, role.local_size, role.node_num) == (5, 8, 1, 4, 2)
    assert (role.address, role.source) == ("gpu003", "slurm")


def test_plain_python_in_an_sbatch_script_is_alone() -> None:
    batch = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
    assert role_from_env(batch) == ALONE


def test_a_launcher_inside_a_slurm_task_wins_over_slurm() -> None:
    assert role_from_env(SLURM | TORCHRUN).source == "torchrun"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_environment_names_what_is_missing(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{missing} is not set, but"):
        role_from_env({k: v for k, v in TORCHRUN.items() if k != missing})


@pytest.mark.parametrize("missing", ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_half_set_openmpi_variables_name_what_is_missing(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{missing} is not set"):
        role_from_env({k: v for k, v in OPENMPI.items() if k != missing})


def test_half_set_slurm_variables_name_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="^SLURM_LOCALID is not set"):
        role_from_env({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"})


@pytest.mark.parametrize(("name", "value"), [("RANK", "8"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "70000")])
def test_numbers_that_make_no_sense_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        role_from_env(TORCHRUN | {name: value})


def test_a_rank_that_is_no_number_is_refused_by_name_and_value() -> None:
    with pytest.raises(ConfigError, match="RANK is 'one'; it must be an integer"):
        role_from_env(TORCHRUN | {"RANK": "one"})


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[003-005,9],x1", "gpu003"), ("a1,a2", "a1"), ("host", "host"), ("n[7,9]-ib", "n7-ib")]
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_in_a_group_that_was_made_by_a_framework_half_set_variables_do() -> None:
    role = role_in_group({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}, rank=1, size=2)
    assert (role.rank, role.size, role.local_rank, role.source) == (1, 2, 1, "group")


def test_a_groups_rank_counts_more_than_the_variables_of_another_job() -> None:
    assert role_in_group(TORCHRUN, rank=3, size=8) == role_from_env(TORCHRUN)
    role = role_in_group(TORCHRUN, rank=0, size=4)
    assert (role.rank, role.size, role.local_rank, role.node_num) == (0, 4, 1, None)


def test_in_a_group_without_variables_the_rank_is_the_place_on_the_node() -> None:
    assert role_in_group({"PATH": "/bin"}, rank=2, size=3).local_rank == 2
