"""Derive processes, devices, log files and environments from the flags. Pure functions, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import ConfigError

CPU_PROCESSES = 2  # without a GPU: the fewest ranks that make a script meet a collective


@dataclass(frozen=True)
class Nodes:
    """The nodes of the job, from this node's view."""

    count: int = 1
    rank: int | None = 0  # None: given in order of arrival at the master
    address: str = "127.0.0.1"  # this node's own, on which its store and its ranks listen
    master: str = "127.0.0.1"  # node 0's
    port: int | None = None  # of node 0's control socket; None: there is only one node
    addresses: tuple[str, ...] = ()  # of all nodes, where --ips names them


@dataclass(frozen=True)
class Plan:
    """All settings of a run, decided before a process is started."""

    target: str  # a script's path, or a module's name
    is_module: bool
    arguments: tuple[str, ...]
    process_count: int
    gpus: tuple[int, ...]  # chosen with --gpus; empty: all that are visible
    devices: tuple[str, ...]  # one for each local rank: "gpu:0", or "cpu"
    log_dir: Path
    nodes: Nodes = Nodes()
    max_restart: int = 0
    hang_timeout_seconds: float = 1800.0
    keeps_warm: bool = True  # a restart forks its ranks from a process that has imported torch
    node_grace_seconds: float = 60.0  # how long another node may be away before it is lost
    restart_window_seconds: float = 3600.0  # progress for so long gives all restarts back
    secret: str = field(default="", repr=False)  # of the job, the same on all nodes; empty: none was given
    log_overwrite: bool = False  # a restart empties the logs; otherwise it appends after a marker line
    log_max_mb: int = 1024  # size of a log, in MiB, beyond which a new one is begun; 0: no limit
    job_id: str = "default"
    variables: Mapping[str, str] = field(default_factory=dict)  # set for every worker
    tee: Literal["all"] | frozenset[int] = frozenset({0})  # the global ranks whose output is shown in full
    hides_gpus: bool = False  # ranks run on the CPU although there are GPUs


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parse "0,1" into (0, 1)."""
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isascii() and entry.isdigit() for entry in entries):
        raise ConfigError(f"--gpus takes GPU numbers with commas between them, such as 0,1; got {text!r}.")
    gpus = tuple(int(entry) for entry in entries)
    if len(set(gpus)) < len(gpus):
        raise ConfigError(f"--gpus names a GPU twice: {text!r}. For more ranks than GPUs, add --nproc_per_node.")
    return gpus


def check_gpus(gpus: tuple[int, ...], *, visible_gpus: int, visible_devices: str | None) -> None:
    """Raise if a GPU does not exist. `visible_devices`: the inherited CUDA_VISIBLE_DEVICES, which limits the choice."""
    if gpus and not visible_gpus:
        raise ConfigError("--gpus was given, but torch sees no GPU here. Leave it out to run on the CPU.")
    if visible_devices:
        allowed = [entry.strip() for entry in visible_devices.split(",")]
        why = f"CUDA_VISIBLE_DEVICES is {visible_devices}"
    else:
        allowed = [str(index) for index in range(visible_gpus)]
        why = f"torch sees {visible_gpus}, counted from 0"
    missing = [str(gpu) for gpu in gpus if str(gpu) not in allowed]
    if missing:
        raise ConfigError(f"--gpus names GPU {', '.join(missing)}, which cannot be used: {why}.")


def count_processes(
    requested: int | Literal["auto", "gpu", "cpu"], *, gpus: tuple[int, ...], visible_gpus: int, cores: int
) -> int:
    """Return the number of ranks to start: by default one per GPU, or two without GPUs."""
    usable_gpus = len(gpus) or visible_gpus
    if requested == "auto":
        return usable_gpus or CPU_PROCESSES
    if requested == "gpu":
        if not usable_gpus:
            raise ConfigError("--nproc_per_node gpu was given, but torch sees no GPU here. Write a number, or cpu.")
        return usable_gpus
    if requested == "cpu":
        if gpus:
            raise ConfigError("--nproc_per_node cpu runs on the CPU, but --gpus names GPUs; keep one of them.")
        return cores
    return requested


def assign_devices(process_count: int, *, gpus: tuple[int, ...], visible_gpus: int) -> tuple[str, ...]:
    """Return the device of each local rank. Surplus ranks share GPUs in turn. `visible_gpus` 0: all on the CPU."""
    usable = gpus or tuple(range(visible_gpus))
    if not usable:
        return ("cpu",) * process_count
    return tuple(f"gpu:{usable[rank % len(usable)]}" for rank in range(process_count))


def check_tee(tee: Literal["all"] | frozenset[int], *, world_size: int) -> None:
    if tee != "all" and max(tee, default=0) >= world_size:
        raise ConfigError(f"--tee names rank {max(tee)}, but the ranks are numbered 0 to {world_size - 1}.")


def log_path(log_dir: Path, rank: int) -> Path:
    """Return the log of a global rank, which holds its stdout and stderr."""
    return log_dir / f"workerlog.{rank}"


def older_log(log: Path) -> Path:
    """Return where a log goes that has reached its greatest size: its rank then begins a new one (worker.py)."""
    return log.with_name(f"{log.name}.1")


def stale_logs(present: Iterable[Path], *, world_size: int) -> list[Path]:
    """Return logs of an earlier, larger run, which would look like part of this run."""
    numbers = {path: path.name.removeprefix("workerlog.").removesuffix(".1") for path in present}
    return [path for path, number in numbers.items() if number.isascii() and number.isdigit() and int(number) >= world_size]


def worker_arguments(shim: Path, plan: Plan) -> tuple[str, ...]:
    """Return the arguments of each worker's Python, which `worker.py` parses."""
    return (str(shim), "module" if plan.is_module else "script", plan.target, *plan.arguments)


def shim_arguments(shim: Path, plan: Plan) -> tuple[str, ...]:
    """Return the same arguments escaped for elastic, which expands ${local_rank} in them and turns $$ into $."""
    return tuple(word.replace("$", "$$") for word in worker_arguments(shim, plan))


def expected_assignment(plan: Plan, local_rank: int) -> dict[str, str]:
    """Return the variables that elastic will set, if all nodes start equally many ranks. A node without a number counts as 1."""
    node = 1 if plan.nodes.rank is None else plan.nodes.rank
    return {
        "RANK": str(node * plan.process_count + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(plan.nodes.count * plan.process_count),
        "LOCAL_WORLD_SIZE": str(plan.process_count),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": plan.nodes.master,
        "MASTER_PORT": "any free one",
    }


def worker_environment(
    assigned: Mapping[str, str], plan: Plan, *, inherited: Mapping[str, str], cores: int, terminal: str | None
) -> dict[str, str]:
    """Return a worker's variables besides `assigned`, those that elastic sets (RANK, MASTER_ADDR, ...)."""
    rank = int(assigned["RANK"])
    added = {
        "PADDLE_TRAINER_ID": assigned["RANK"],
        "PADDLE_TRAINERS_NUM": assigned["WORLD_SIZE"],
        "PYTHONUNBUFFERED": "1",
        "FLEETX_WORKER_LOG": str(log_path(plan.log_dir, rank).absolute()),
        "FLEETX_WORKER_LOG_MB": str(plan.log_max_mb),
    }
    if "OMP_NUM_THREADS" not in inherited:
        added["OMP_NUM_THREADS"] = str(max(1, cores // plan.process_count))
    if plan.gpus:  # every rank sees all of them: LOCAL_RANK is the index
        added["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in plan.gpus)
    if plan.hides_gpus:
        added["CUDA_VISIBLE_DEVICES"] = ""
    if terminal is not None and rank == 0:
        added["FLEETX_TTY"] = terminal
    return {**added, **plan.variables}
