"""Ranks from launchers' variables, each tested with the variables the launcher sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fleetx.dist.launch_variables import ALONE, first_host, job_port, role_from_env, role_in_group
from fleetx.errors import ConfigError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GROUP_WORLD_SIZE": "4",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "job-17",
}  # fmt: skip
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4",
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


def test_mvapich_joins_by_its_own_variables_also_where_hydra_has_started_it() -> None:
    role = role_from_env(MVAPICH)
    assert (role.rank, role.size, role.local_rank, role.local_size, role.address) == (1, 4, 1, 4, "127.0.0.1")
    assert (role.source, role.port) == ("mvapich", job_port(""))
    assert role_from_env(MVAPICH | {"PBS_JOBID": "88.host"}).port == job_port("88.host")
    by_hydra = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    assert role_from_env(MVAPICH | by_hydra) == role


def test_mvapich_on_several_nodes_asks_for_the_address_by_name() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set, but mpirun on several nodes is"):
        role_from_env(MVAPICH | {"MV2_COMM_WORLD_LOCAL_SIZE": "2"})


@pytest.mark.parametrize("missing", ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"])
def test_half_set_mvapich_variables_name_what_is_missing(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{missing} is not set"):
        role_from_env({k: v for k, v in MVAPICH.items() if k != missing})


def test_a_rank_of_pmix_without_a_size_is_refused_with_lines_that_work() -> None:
    with pytest.raises(ConfigError, match="^PMIX_RANK is set, but no variable says how many processes") as refused:
        role_from_env({"PMIX_RANK": "1"})
    line = str(refused.value).split("os.environ.update(")[1].split(")`")[0]

    os = SimpleNamespace(environ={"PMIX_RANK": "1"})
    written = eval(f"dict({line})", {"os": os, "world_size": 2})  # noqa: S307  # our own line
    role = role_from_env({"PMIX_RANK": "1"} | written)
    assert (role.rank, role.size, role.source) == (1, 2, "torchrun")


def test_a_rank_of_pmix_beside_variables_that_say_more_changes_nothing() -> None:
    one_task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}
    assert role_from_env(one_task | {"PMIX_RANK": "0"}) == ALONE
    for env in (TORCHRUN, OPENMPI, SLURM):
        assert role_from_env(env | {"PMIX_RANK": "0"}) == role_from_env(env)


def test_mpich_and_intel_mpi_on_one_node_need_no_address() -> None:
    role = role_from_env(HYDRA)
    assert (role.rank, role.size, role.local_rank, role.local_size, role.address) == (2, 4, 2, 4, "127.0.0.1")
    assert (role.source, role.port) == ("mpich", job_port(""))
    assert role_from_env(HYDRA | {"PBS_JOBID": "88.host"}).port == job_port("88.host")


def test_mpich_on_several_nodes_asks_for_the_address_by_name() -> None:
    two_nodes = HYDRA | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set, but mpiexec on several nodes is"):
        role_from_env(two_nodes)
    role = role_from_env(two_nodes | {"MASTER_ADDR": "node0", "MASTER_PORT": "2345"})
    assert (role.rank, role.local_rank, role.address, role.port) == (2, 0, "node0", 2345)


@pytest.mark.parametrize("missing", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"])
def test_half_set_variables_of_mpich_name_what_is_missing(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{missing} is not set, but"):
        role_from_env({k: v for k, v in HYDRA.items() if k != missing})


def test_mpiexec_of_one_process_is_alone_whatever_address_is_set() -> None:
    role = role_from_env({"PMI_RANK": "0", "PMI_SIZE": "1", "MASTER_ADDR": "node0"})
    assert (role.rank, role.size, role.address) == (0, 1, None)


def test_crays_names_for_the_place_on_a_node_are_known() -> None:
    role = role_from_env({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PBS_JOBID": "7"})
    assert (role.rank, role.local_rank, role.local_size, role.address) == (1, 1, 2, "127.0.0.1")


def test_pmi_numbers_of_srun_leave_the_address_to_slurm() -> None:
    assert role_from_env(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}) == role_from_env(SLURM)


def test_mpiexec_in_a_slurm_job_counts_more_than_the_tasks_that_slurm_started_for_it() -> None:
    proxy = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert (role_from_env(proxy | HYDRA).rank, role_from_env(proxy | HYDRA).source) == (2, "mpich")


def test_slurm() -> None:
    role = role_from_env(SLURM)
    assert (role.rank, role.size, role.local_rank, role.local_size, role.node_num) == (5, 8, 1, 4, 2)
    assert (role.address, role.source) == ("gpu003", "slurm")


def test_plain_python_in_an_sbatch_script_is_alone() -> None:
    batch = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
    assert role_from_env(batch) == ALONE


@pytest.mark.parametrize("how", [{"SLURM_STEP_ID": "0"}, {"ENVIRONMENT": "BATCH"}, {"SLURM_JOB_NAME": "interactive"}])
def test_one_slurm_task_is_alone_beside_an_address_that_was_exported_for_many(how: dict[str, str]) -> None:
    task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "4711", "MASTER_ADDR": "gpu003", "MASTER_PORT": "2345"}
    assert role_from_env(task | how) == ALONE


def test_a_shell_of_salloc_is_alone() -> None:
    assert role_from_env({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gpu[003-004]"}) == ALONE


def test_a_job_script_may_export_the_size_and_leave_the_rank_to_srun() -> None:
    exported = {"WORLD_SIZE": "8", "MASTER_ADDR": "gpu003", "MASTER_PORT": "2345"}
    role = role_from_env(SLURM | exported)
    assert (role.rank, role.size, role.address, role.port, role.source) == (5, 8, "gpu003", 2345, "slurm")
    with pytest.raises(ConfigError, match="WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, but RANK is not"):
        role_from_env(SLURM | exported | {"WORLD_SIZE": "16"})


def test_a_launcher_inside_a_slurm_task_wins_over_slurm() -> None:
    assert role_from_env(SLURM | TORCHRUN).source == "torchrun"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_environment_names_what_is_missing(missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"set, but {missing} is not: .*os\.environ\.update\({missing}="):
        role_from_env({k: v for k, v in TORCHRUN.items() if k != missing})


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        ({"MASTER_ADDR": "10.0.0.1"}, "MASTER_ADDR is set, but RANK, WORLD_SIZE and MASTER_PORT are not"),
        (
            {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
            "MASTER_ADDR and MASTER_PORT are set, but RANK and WORLD_SIZE are not",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is set, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "RANK is set, but WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not"),
    ],
)
def test_a_function_of_spawn_that_sets_only_some_variables_is_shown_all_that_it_must_set(
    there: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}: this process would train alone") as refused:
        role_from_env(there)
    assert f"for one process alone unset {' '.join(name for name in there if there[name])}." in str(refused.value)


def test_the_line_in_the_refusal_completes_a_half_set_environment() -> None:
    there, rank, world_size = {"LOCAL_RANK": "1"}, 1, 2
    with pytest.raises(ConfigError) as refused:
        role_from_env(there)
    line = str(refused.value).split("os.environ.update(")[1].split(")`")[0]
    written = eval(f"dict({line})", {"rank": rank, "world_size": world_size})  # noqa: S307  # our own line
    assert (role_from_env(there | written).rank, role_from_env(there | written).size) == (rank, world_size)


def test_accelerate_launch_on_cpus_starts_one_process_and_is_refused_with_the_line_that_starts_more() -> None:
    by_accelerate = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(ConfigError, match="accelerate launch --multi_gpu --num_processes 2 train.py"):
        role_from_env(by_accelerate | {"MASTER_PORT": "29500"})
    assert role_from_env(by_accelerate | TORCHRUN).source == "torchrun"


def test_one_rank_of_one_needs_no_address() -> None:
    role = role_from_env({"RANK": "0", "WORLD_SIZE": "1"})
    assert (role.rank, role.size, role.address) == (0, 1, None)


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
