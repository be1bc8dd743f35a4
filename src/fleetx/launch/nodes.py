"""Which machines take part, and which of them is this one? Pure functions of flags, environment, and what a machine knows."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from fleetx.dist.roles import first_host, is_pmi_of_slurm, is_slurm_shell, job_port, pmi_job
from fleetx.errors import ConfigError
from fleetx.launch.topology import Nodes

Env = Mapping[str, str]
Source = Literal["local", "slurm", "mpi"]

DEFAULT_PORT = 6070
PORTS = range(1024, 65536)
OUTSIDE = "192.0.2.1"  # reserved for documentation: only the route to it is looked up, nothing is sent
SLURM_SHELL_STEPS = ("4294967290", "4294967291")  # the interactive step, and the batch script: shells, not tasks


@dataclass(frozen=True)
class Asked:
    """The flags about nodes, as given."""

    ips: str | None = None
    nnodes: int | None = None
    master: str | None = None
    rank: int | None = None
    host: str | None = None
    start_port: int | None = None
    source: Source | None = None


@dataclass(frozen=True)
class Told:
    """What the variables of a cluster manager say."""

    count: int
    rank: int | None = None
    master: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Machine:
    """What this machine knows of addresses. Asked only about several nodes: a name server that is gone takes seconds."""

    own_addresses: Callable[[], tuple[str, ...]]
    resolve: Callable[[str], str]  # OSError: there is no such host
    route_to: Callable[[str], str | None]  # the own address from which that one is reached


def find_nodes(asked: Asked, env: Env, machine: Machine) -> Nodes:
    """Flags beat variables: --ips and --nnodes say all there is to know."""
    if asked.ips is not None:
        return _from_ips(asked, asked.ips, machine)
    told = Told(count=asked.nnodes or 1)
    if asked.nnodes is None or asked.source is not None:
        told = read_variables(env, asked.source)
    count = asked.nnodes or told.count
    if count != told.count:
        raise ConfigError(f"--nnodes {count} was given, but the variables of {asked.source} tell of {told.count}; leave one out.")
    rank = _checked_rank(asked.rank if asked.rank is not None else told.rank, count)
    master = asked.master or told.master
    if count == 1:
        if asked.master is not None and asked.nnodes is None:
            raise ConfigError(f"--master {asked.master} needs the number of nodes as well; add --nnodes N.")
        return Nodes()
    if master is None:
        raise ConfigError(
            f"{count} nodes need a place to meet; write --master HOST with node 0's address, or --ips A,B with all."
        )
    return _around_master(asked, Told(count, rank, master, told.port), master, machine)


def _around_master(asked: Asked, told: Told, master: str, machine: Machine) -> Nodes:
    name, port = split_master(master)
    where = _resolve(name, "--master", machine)
    own = _resolve(asked.host, "--host", machine) if asked.host is not None else None
    rank = told.rank
    if rank is None and (own == where if own is not None else where in machine.own_addresses()):
        rank = 0
    if own is None:
        own = where if rank == 0 else machine.route_to(where) or _outward_address(machine)
    if own is None:
        raise ConfigError(f"this machine finds no way to node 0 at {where}; name its own address with --host.")
    if rank == 0 and asked.host is None and not _is_loopback(own) and own not in machine.own_addresses():
        addresses = ", ".join(machine.own_addresses())
        raise ConfigError(f"this is node 0, but {where} is none of its addresses ({addresses}); name one with --host.")
    # Node 0 listens on its own address, also where the others know it by another one.
    return Nodes(
        count=told.count,
        rank=rank,
        address=own,
        master=own if rank == 0 else where,
        port=port or asked.start_port or told.port or DEFAULT_PORT,
    )


def _from_ips(asked: Asked, ips: str, machine: Machine) -> Nodes:
    names = [name.strip() for name in ips.split(",")]
    if not all(names):
        raise ConfigError(f"--ips takes addresses with commas between them, such as 10.0.0.1,10.0.0.2; got {ips!r}.")
    if asked.master is not None:
        raise ConfigError("--ips and --master both say where node 0 is; keep one of them.")
    if asked.nnodes not in (None, len(names)):
        raise ConfigError(f"--ips names {len(names)} nodes, but --nnodes is {asked.nnodes}; leave --nnodes out.")
    addresses = [_resolve(name, "--ips", machine) for name in names]
    twice = next((name for name, address in zip(names, addresses, strict=True) if addresses.count(address) > 1), None)
    if twice is not None:
        raise ConfigError(f"--ips names the machine {twice} twice: {ips}. Name each node once.")
    rank = _own_entry(asked, addresses, machine)
    if len(addresses) == 1:
        return Nodes()
    return Nodes(len(addresses), rank, addresses[rank], addresses[0], asked.start_port or DEFAULT_PORT)


def _own_entry(asked: Asked, addresses: list[str], machine: Machine) -> int:
    listed = ", ".join(addresses)
    if asked.rank is not None:
        _checked_rank(asked.rank, len(addresses))
    if asked.host is not None:
        own = _resolve(asked.host, "--host", machine)
        if own not in addresses:
            raise ConfigError(f"--host {asked.host} is none of the nodes in --ips, which are {listed}.")
        if asked.rank not in (None, addresses.index(own)):
            raise ConfigError(
                f"--host {asked.host} is node {addresses.index(own)} of --ips, but --rank is {asked.rank}; keep one."
            )
        return addresses.index(own)
    if asked.rank is not None:
        return asked.rank
    own_addresses = machine.own_addresses()
    own_entries = [index for index, address in enumerate(addresses) if address in own_addresses]
    if len(own_entries) == 1:
        return own_entries[0]
    if own_entries:
        matching = ", ".join(addresses[index] for index in own_entries)
        raise ConfigError(
            f"--ips names several addresses of this machine: {matching}; say which is this node with --host ADDRESS."
        )
    raise ConfigError(
        f"none of the nodes in --ips ({listed}) is this machine, whose addresses are {', '.join(own_addresses)}; "
        "correct the list, or say which entry this is with --host ADDRESS."
    )


def read_variables(env: Env, source: Source | None) -> Told:
    """Of MPI, else of Slurm; one node when neither started us. `source` says whom to believe."""
    readers = {"mpi": _from_mpi, "slurm": _from_slurm}
    if source == "local":
        return Told(1)
    if source is not None:
        told = readers[source](env)
        if told is None:
            start = "srun --ntasks-per-node=1 fleetrun" if source == "slurm" else "mpirun --npernode 1 fleetrun"
            raise ConfigError(f"--env {source} was given, but its variables are not set here; start with `{start} ...`.")
        return told
    return _from_mpi(env) or _from_slurm(env) or Told(1)


def _from_slurm(env: Env) -> Told | None:
    if "SLURM_PROCID" not in env or is_slurm_shell(env) or env.get("SLURM_STEP_ID") in SLURM_SHELL_STEPS:
        return None
    count = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", default=1)
    task_count = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=count)
    if task_count > count:
        raise ConfigError(
            f"Slurm started {task_count} tasks on {count} node{'s' * (count > 1)}, each of which would start ranks of its own. "
            "Write `srun --ntasks-per-node=1 fleetrun x.py` to let fleetrun start the ranks, or `srun python x.py` to let Slurm."
        )
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    return Told(
        count=count,
        rank=_number(env, "SLURM_NODEID", default=0) if count == 1 else _number(env, "SLURM_NODEID"),
        master=env.get("MASTER_ADDR") or (first_host(hosts) if hosts else None),
        port=_told_port(env, env.get("SLURM_JOB_ID", "")),
    )


def _from_mpi(env: Env) -> Told | None:
    job_of_openmpi = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    for prefix, job in (("OMPI_COMM_WORLD_", job_of_openmpi), ("MV2_COMM_WORLD_", pmi_job(env))):
        if f"{prefix}SIZE" in env:
            _refuse_ranks_of_mpi(_number(env, f"{prefix}LOCAL_SIZE", default=1))
            port = _told_port(env, job)
            return Told(_number(env, f"{prefix}SIZE"), _number(env, f"{prefix}RANK"), env.get("MASTER_ADDR"), port)
    if "PMI_SIZE" in env and not is_pmi_of_slurm(env):
        _refuse_ranks_of_mpi(_number(env, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", default=1))
        return Told(_number(env, "PMI_SIZE"), _number(env, "PMI_RANK"), env.get("MASTER_ADDR"), _told_port(env, pmi_job(env)))
    return None


def _refuse_ranks_of_mpi(local_count: int) -> None:
    if local_count > 1:
        raise ConfigError(
            f"mpirun started {local_count} processes on this node, each of which would start ranks of its own. Write "
            "`mpirun --npernode 1 fleetrun x.py` (MPICH, Intel MPI: `-ppn 1`) to let fleetrun start the ranks, or `mpirun python "
            "x.py` to let mpirun."
        )


def _told_port(env: Env, job: str) -> int:
    return _checked_port(env["MASTER_PORT"], "MASTER_PORT") if env.get("MASTER_PORT") else job_port(job)


def _number(env: Env, *names: str, default: int | None = None) -> int:
    """Of the first of these variables that is set."""
    name = next((name for name in names if env.get(name)), None)
    if name is None and default is not None:
        return default
    text = env[name] if name is not None else ""
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name or names[0]} is {text!r}; it must be a whole number. To ignore it, add --env local.")
    return int(text)


def _checked_rank(rank: int | None, count: int) -> int | None:
    if rank is not None and not 0 <= rank < count:
        raise ConfigError(f"node {rank} was given by --rank or a variable, but nodes are numbered 0 to {count - 1}.")
    return rank


def split_master(text: str) -> tuple[str, int | None]:
    """ "host", "host:6070", "[fe80::1]:6070" or a bare IPv6 address."""
    match = re.fullmatch(
        r"\[([0-9A-Fa-f:.]+)\](?::(.*))?|([^:/\s\[\]]+)(?::([^:]*))?|([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)", text
    )
    if match is None:
        raise ConfigError(f"--master takes HOST or HOST:PORT, such as 10.0.0.1:{DEFAULT_PORT}; got {text!r}.")
    port = match[2] if match[2] is not None else match[4]
    return match[1] or match[3] or match[5], None if port is None else _checked_port(port, "--master")


def _checked_port(text: str, told_by: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) in PORTS):
        raise ConfigError(f"{told_by} names the port {text!r}; a port from {PORTS.start} to {PORTS.stop - 1} is needed.")
    return int(text)


def _resolve(name: str, flag: str, machine: Machine) -> str:
    try:
        address = machine.resolve(name)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the address of {name!r} ({flag}) cannot be found: {error}; write its IP address.") from error
    # Many systems map a machine's own name to 127.0.1.1, on which no other machine would reach it.
    if _is_loopback(address) and name != "localhost" and not _is_address(name):
        return _outward_address(machine) or address
    return address


def _outward_address(machine: Machine) -> str | None:
    return machine.route_to(OUTSIDE) or next((own for own in machine.own_addresses() if not _is_loopback(own)), None)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def this_machine() -> Machine:
    return Machine(_own_addresses, _look_up, _route_to)


def _own_addresses() -> tuple[str, ...]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in families]
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    return tuple(dict.fromkeys(address.split("%")[0] for address in found))


def _look_up(name: str) -> str:
    if _is_address(name):
        return str(ipaddress.ip_address(name))
    found = [(entry[0], str(entry[4][0]).split("%")[0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return min(found, key=lambda entry: (_is_loopback(entry[1]), entry[0] != socket.AF_INET))[1]


def _route_to(address: str) -> str | None:
    """Connecting a datagram socket sends nothing: it makes the kernel choose the address it would send from."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None
