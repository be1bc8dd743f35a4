"""Read rank and size from the variables of torchrun, fleetrun, Open MPI, MVAPICH, MPICH, Intel MPI or Slurm.

Pure functions of an environment. Variables that describe a job but not this process's rank in it are an error: otherwise N
processes would each train alone and look like one job.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError

Env = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Role:
    """Rank, size and rendezvous address of this process. `source` names the launcher whose variables were read."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    source: str
    address: str | None = None
    port: int | None = None
    node_num: int | None = None


ALONE = Role(rank=0, size=1, local_rank=0, local_size=1, source="none", node_num=1)

WRITE = {"RANK": "str(rank)", "WORLD_SIZE": "str(world_size)", "MASTER_ADDR": '"127.0.0.1"', "MASTER_PORT": '"29500"'}
"""The variables that define a job for torchrun, with the value that a script on one machine would set."""
JOB = tuple(WRITE)
JOB_IDS = ("PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def role_from_env(env: Env) -> Role:
    """Read the role that a launcher set, or ALONE without one. Half-set variables raise an error that names all of them."""
    if env.get("RANK") and env.get("WORLD_SIZE"):
        return _checked(_from_torchrun(env))
    role = _from_openmpi(env) or _from_mvapich(env) or _from_pmi(env) or _from_slurm(env)
    if role is not None and _agrees_with_job(role, env):
        return _checked(role)
    refuse_half_set(env)
    refuse_pmix_alone(env)
    return ALONE


def role_in_group(env: Env, *, rank: int, size: int) -> Role:
    """Build the role for an existing process group, whose rank and size are known: the variables may be half set (Lightning sets
    only WORLD_SIZE and LOCAL_RANK) or belong to a different job."""
    with contextlib.suppress(ConfigError):
        role = role_from_env(env)
        if (role.rank, role.size) == (rank, size):
            return role
    local = {name: int(env[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if env.get(name, "").isdecimal()}
    local_rank, local_size = local.get("LOCAL_RANK", rank), local.get("LOCAL_WORLD_SIZE", size)
    return Role(rank=rank, size=size, local_rank=local_rank, local_size=local_size, source="group")


def _agrees_with_job(role: Role, env: Env) -> bool:
    """Return whether torchrun's variables, as far as set, match the role: job scripts often export WORLD_SIZE without RANK."""
    return not env.get("RANK") and env.get("WORLD_SIZE", str(role.size)) == str(role.size)


def _from_torchrun(env: Env) -> Role:
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    alone_anyway = size == 1 and not env.get("MASTER_ADDR") and not env.get("MASTER_PORT")
    if not alone_anyway:
        refuse_half_set(env)
    return Role(
        rank=rank,
        size=size,
        local_rank=_integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank,
        local_size=_integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else size,
        source="torchrun",
        address=None if alone_anyway else env["MASTER_ADDR"],
        port=None if alone_anyway else _integer(env, "MASTER_PORT"),
        node_num=_integer(env, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in env else None,
    )


def refuse_half_set(env: Env) -> None:
    """Raise when some of torchrun's variables are set and others are not."""
    there, missing = [name for name in JOB if env.get(name)], [name for name in JOB if not env.get(name)]
    stray = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if env.get(name)]
    if not missing or not there + stray:
        return
    if "SLURM_PROCID" in env and not env.get("RANK") and not env.get("WORLD_SIZE"):
        return  # MASTER_ADDR was exported for an srun of many tasks; this is the job's shell, or an srun of one
    if "ACCELERATE_MIXED_PRECISION" in env and not env.get("RANK"):
        raise ConfigError(
            "accelerate launch has started one process: with --cpu or without GPUs it starts no more, whatever --num_processes "
            "is. Write "
            "`accelerate launch --multi_gpu --num_processes 2 train.py`, which needs no GPU where the script has "
            "Accelerator(cpu=True), or `fleetrun --nproc_per_node 2 train.py`; for one process write --num_processes 1."
        )
    lines = ", ".join(f"{name}={WRITE[name]}" for name in missing)
    raise ConfigError(
        f"{_listed(there + stray)} set, but {_listed(missing)} not: this process would train alone. Start with fleetrun or "
        f"torchrun, which set all of them; in a function for mp.spawn write `os.environ.update({lines})` before fleet.init(); "
        f"for one process alone unset {' '.join(there + stray)}."
    )


def refuse_pmix_alone(env: Env) -> None:
    """Raise where PMIx gives a rank and no other variable the size; Slurm's, which may stand beside it, have been read."""
    if env.get("PMIX_RANK") and "SLURM_PROCID" not in env:
        lines = ", ".join(f"{name}={WRITE[name]}" for name in JOB if name != "RANK")
        raise ConfigError(
            "PMIX_RANK is set, but no variable says how many processes there are: this process would train alone. Start with "
            "fleetrun, torchrun or Open MPI's mpirun, which set all that is needed; or write "
            f'`os.environ.update(RANK=os.environ["PMIX_RANK"], {lines})` before fleet.init(); for one process alone unset '
            "PMIX_RANK."
        )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]} are" if len(names) > 1 else f"{names[0]} is"


def _from_openmpi(env: Env) -> Role | None:
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    return _from_comm_world(env, "OMPI_COMM_WORLD_", source="openmpi", job=job)


def _from_mvapich(env: Env) -> Role | None:
    """Read the variables of mpirun_rsh, the launcher of MVAPICH2."""
    return _from_comm_world(env, "MV2_COMM_WORLD_", source="mvapich", job=pmi_job(env))


def _from_comm_world(env: Env, prefix: str, *, source: str, job: str) -> Role | None:
    """Read rank and size under this prefix; `job` tells two jobs on one node apart and is the same on every rank."""
    if f"{prefix}RANK" not in env and f"{prefix}SIZE" not in env:
        return None
    rank = _integer(env, f"{prefix}RANK", because=f"{prefix}SIZE")
    size = _integer(env, f"{prefix}SIZE", because=f"{prefix}RANK")
    local_size = _integer(env, f"{prefix}LOCAL_SIZE", because=f"{prefix}RANK")
    on_one_node = local_size == size
    return Role(
        rank=rank,
        size=size,
        local_rank=_integer(env, f"{prefix}LOCAL_RANK", because=f"{prefix}RANK"),
        local_size=local_size,
        source=source,
        address="127.0.0.1"
        if on_one_node and "MASTER_ADDR" not in env
        else _text(env, "MASTER_ADDR", because="mpirun on several nodes"),
        port=_integer(env, "MASTER_PORT") if "MASTER_PORT" in env else job_port(job),
    )


def _from_pmi(env: Env) -> Role | None:
    """Read the variables of Hydra, the launcher of MPICH and Intel MPI; Cray's PALS uses other names for the local rank."""
    if ("PMI_RANK" not in env and "PMI_SIZE" not in env) or is_pmi_of_slurm(env):
        return None
    rank, size = _integer(env, "PMI_RANK", because="PMI_SIZE"), _integer(env, "PMI_SIZE", because="PMI_RANK")
    if size == 1:
        return Role(rank=rank, size=1, local_rank=0, local_size=1, source="mpich", node_num=1)
    local_size = _integer(env, _first_set(env, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), because="PMI_RANK")
    on_one_node = local_size == size and not env.get("MASTER_ADDR")
    return Role(
        rank=rank,
        size=size,
        local_rank=_integer(env, _first_set(env, "MPI_LOCALRANKID", "PMI_LOCAL_RANK"), because="PMI_RANK"),
        local_size=local_size,
        source="mpich",
        address="127.0.0.1" if on_one_node else _text(env, "MASTER_ADDR", because="mpiexec on several nodes"),
        port=_integer(env, "MASTER_PORT") if "MASTER_PORT" in env else job_port(pmi_job(env)),
    )


def is_pmi_of_slurm(env: Env) -> bool:
    """Return whether PMI's variables come from `srun --mpi=pmi2`; Slurm's own then agree and also list the nodes."""
    same = (env.get("SLURM_PROCID"), env.get("SLURM_NTASKS")) == (env.get("PMI_RANK"), env.get("PMI_SIZE"))
    return same and not is_slurm_shell(env)


def pmi_job(env: Env) -> str:
    """Return the batch system's job id, or "": Hydra itself gives a job no name."""
    return next((env[name] for name in JOB_IDS if env.get(name)), "")


def _first_set(env: Env, *names: str) -> str:
    return next((name for name in names if env.get(name)), names[0])


def _from_slurm(env: Env) -> Role | None:
    if "SLURM_PROCID" not in env or env.get("SLURM_NTASKS", "1") == "1" or is_slurm_shell(env):
        return None
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if "MASTER_ADDR" not in env and nodes is None:
        raise ConfigError("SLURM_PROCID is set but SLURM_JOB_NODELIST is not; start with srun, or set MASTER_ADDR.")
    node_num = _integer(env, "SLURM_NNODES") if "SLURM_NNODES" in env else None
    size = _integer(env, "SLURM_NTASKS", because="SLURM_PROCID")
    return Role(
        rank=_integer(env, "SLURM_PROCID"),
        size=size,
        local_rank=_integer(env, "SLURM_LOCALID", because="SLURM_PROCID"),
        local_size=size if node_num is None else -(-size // node_num),
        source="slurm",
        address=env.get("MASTER_ADDR") or first_host(nodes or ""),
        port=_integer(env, "MASTER_PORT") if "MASTER_PORT" in env else job_port(env.get("SLURM_JOB_ID", "")),
        node_num=node_num,
    )


def is_slurm_shell(env: Env) -> bool:
    """Return whether this is plain `python` in an sbatch script or shell: Slurm's numbers then describe the allocation."""
    in_shell = env.get("ENVIRONMENT") == "BATCH" or env.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return in_shell and "SLURM_STEP_ID" not in env


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm list: "gpu[003-005,9],x1" gives "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,]*))?", nodelist)
    if match is None:
        raise ConfigError(f"cannot read the Slurm node list {nodelist!r}; set MASTER_ADDR to the first node's address.")
    if match[2] is None:
        return match[1]
    return match[1] + re.split(r"[-,]", match[2])[0] + (match[3] or "")


def job_port(job: str) -> int:
    """Derive a port from the job id: equal on all ranks of a job, rarely equal for two jobs on one node."""
    return 20000 + zlib.crc32(job.encode()) % 12000


def _text(env: Env, name: str, *, because: str) -> str:
    if not env.get(name):
        raise ConfigError(f"{name} is not set, but {because} is. Launch with fleetrun or torchrun, or set {name} too.")
    return env[name]


def _integer(env: Env, name: str, *, because: str = "") -> int:
    text = _text(env, name, because=because)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be an integer.") from None


def _checked(role: Role) -> Role:
    if role.size < 1 or not 0 <= role.rank < role.size:
        raise ConfigError(
            f"rank {role.rank} of {role.size} (from {role.source} variables): a rank must be at least 0 and below the size."
        )
    if role.local_rank < 0 or (role.port is not None and not 0 < role.port < 65536):
        raise ConfigError(f"local rank {role.local_rank}, port {role.port} (from {role.source} variables) cannot be used.")
    return role
