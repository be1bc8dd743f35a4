"""Find the nodes of a job and which one this machine is. Pure functions of flags, environment and the machine's addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..dist.launch_variables import first_host, is_pmi_of_slurm, is_slurm_shell, job_port, pmi_job
from ..errors import ConfigError
from .topology import Nodes

Env = Mapping[str, str]
Source = Literal["local", "slurm", "mpi"]

DEFAULT_PORT = 6070
PORTS = range(1024, 65536)
OUTSIDE = "192.0.2.1"  # reserved for documentation: only the route to it is looked up, nothing is sent
SLURM_SHELL_STEPS = ("4294967290", "4294967291")  # the interactive step and the batch script, which are shells and not tasks


@dataclass(frozen=True)
class NodeFlags:
    """The flags about nodes, as given; None: not given."""

    ips: str | None = None
    nnodes: int | None = None
    master: str | None = None
    rank: int | None = None
    host: str | None = None
    start_port: int | None = None
    source: Source | None = None


@dataclass(frozen=True)
class ClusterNodes:
    """The nodes according to the variables of a cluster manager; None: not set."""

    count: int
    rank: int | None = None
    master: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Machine:
    """Address lookups of this machine. Called only for several nodes: a dead name server blocks for seconds."""

    own_addresses: Callable[[], tuple[str, ...]]
    resolve: Callable[[str], str]  # OSError: there is no such host
    route_to: Callable[[str], str | None]  # the own address used to reach the given one


def find_nodes(flags: NodeFlags, env: Env, machine: Machine) -> Nodes:
    """Find the nodes. Flags take precedence over variables: with --ips or --nnodes no variables are read."""
    if flags.ips is not None:
        return _from_ips(flags, flags.ips, machine)
    cluster = ClusterNodes(count=flags.nnodes or 1)
    if flags.nnodes is None or flags.source is not None:
        cluster = read_variables(env, flags.source)
    count = flags.nnodes or cluster.count
    if count != cluster.count:
        raise ConfigError(f"--nnodes {count} was given, but the variables of {flags.source} say {cluster.count}; leave one out.")
    rank = _checked_rank(flags.rank if flags.rank is not None else cluster.rank, count)
    master = flags.master or cluster.master
    if count == 1:
        if flags.master is not None and flags.nnodes is None:
            raise ConfigError(f"--master {flags.master} needs the number of nodes as well; add --nnodes N.")
        return Nodes()
    if master is None:
        raise ConfigError(f"{count} nodes need a rendezvous; write --master HOST with node 0's address, or --ips A,B with all.")
    return _around_master(flags, ClusterNodes(count, rank, master, cluster.port), master, machine)


def _around_master(flags: NodeFlags, cluster: ClusterNodes, master: str, machine: Machine) -> Nodes:
    name, port = split_master(master)
    where = _resolve(name, "--master", machine)
    own = _resolve(flags.host, "--host", machine) if flags.host is not None else None
    rank = cluster.rank
    if rank is None and (own == where if own is not None else where in machine.own_addresses()):
        rank = 0
    if own is None:
        own = where if rank == 0 else machine.route_to(where) or _outward_address(machine)
    if own is None:
        raise ConfigError(f"this machine has no route to node 0 at {where}; name its own address with --host.")
    if rank == 0 and flags.host is None and not _is_loopback(own) and own not in machine.own_addresses():
        addresses = ", ".join(machine.own_addresses())
        raise ConfigError(f"this is node 0, but {where} is none of its addresses ({addresses}); name one with --host.")
    # Node 0 listens on its own address, even if the others reach it by a different one.
    return Nodes(
        count=cluster.count,
        rank=rank,
        address=own,
        master=own if rank == 0 else where,
        port=port or flags.start_port or cluster.port or DEFAULT_PORT,
    )


def _from_ips(flags: NodeFlags, ips: str, machine: Machine) -> Nodes:
    names = [name.strip() for name in ips.split(",")]
    if not all(names):
        raise ConfigError(f"--ips takes addresses with commas between them, such as 10.0.0.1,10.0.0.2; got {ips!r}.")
    if flags.master is not None:
        raise ConfigError("--ips and --master both say where node 0 is; keep one of them.")
    if flags.nnodes not in (None, len(names)):
        raise ConfigError(f"--ips names {len(names)} nodes, but --nnodes is {flags.nnodes}; leave --nnodes out.")
    addresses = [_resolve(name, "--ips", machine) for name in names]
    twice = next((name for name, address in zip(names, addresses, strict=True) if addresses.count(address) > 1), None)
    if twice is not None:
        raise ConfigError(f"--ips names the machine {twice} twice: {ips}. Name each node once.")
    rank = _own_entry(flags, addresses, machine)
    if len(addresses) == 1:
        return Nodes()
    return Nodes(len(addresses), rank, addresses[rank], addresses[0], flags.start_port or DEFAULT_PORT, tuple(addresses))


def _own_entry(flags: NodeFlags, addresses: list[str], machine: Machine) -> int:
    listed = ", ".join(addresses)
    if flags.rank is not None:
        _checked_rank(flags.rank, len(addresses))
    if flags.host is not None:
        own = _resolve(flags.host, "--host", machine)
        if own not in addresses:
            raise ConfigError(f"--host {flags.host} is none of the nodes in --ips, which are {listed}.")
        if flags.rank not in (None, addresses.index(own)):
            raise ConfigError(
                f"--host {flags.host} is node {addresses.index(own)} of --ips, but --rank is {flags.rank}; keep one."
            )
        return addresses.index(own)
    if flags.rank is not None:
        return flags.rank
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


def read_variables(env: Env, source: Source | None) -> ClusterNodes:
    """Read the variables of MPI, else of Slurm; one node if neither started this process. `source` selects one of them."""
    readers = {"mpi": _from_mpi, "slurm": _from_slurm}
    if source == "local":
        return ClusterNodes(1)
    if source is not None:
        cluster = readers[source](env)
        if cluster is None:
            start = "srun --ntasks-per-node=1 fleetrun" if source == "slurm" else "mpirun --npernode 1 fleetrun"
            raise ConfigError(f"--env {source} was given, but its variables are not set here; start with `{start} ...`.")
        return cluster
    return _from_mpi(env) or _from_slurm(env) or ClusterNodes(1)


def _from_slurm(env: Env) -> ClusterNodes | None:
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
    return ClusterNodes(
        count=count,
        rank=_number(env, "SLURM_NODEID", default=0) if count == 1 else _number(env, "SLURM_NODEID"),
        master=env.get("MASTER_ADDR") or (first_host(hosts) if hosts else None),
        port=_cluster_port(env, env.get("SLURM_JOB_ID", "")),
    )


def _from_mpi(env: Env) -> ClusterNodes | None:
    job_of_openmpi = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    for prefix, job in (("OMPI_COMM_WORLD_", job_of_openmpi), ("MV2_COMM_WORLD_", pmi_job(env))):
        if f"{prefix}SIZE" in env:
            _refuse_ranks_of_mpi(_number(env, f"{prefix}LOCAL_SIZE", default=1))
            port = _cluster_port(env, job)
            return ClusterNodes(_number(env, f"{prefix}SIZE"), _number(env, f"{prefix}RANK"), env.get("MASTER_ADDR"), port)
    if "PMI_SIZE" in env and not is_pmi_of_slurm(env):
        _refuse_ranks_of_mpi(_number(env, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", default=1))
        return ClusterNodes(
            _number(env, "PMI_SIZE"), _number(env, "PMI_RANK"), env.get("MASTER_ADDR"), _cluster_port(env, pmi_job(env))
        )
    return None


def _refuse_ranks_of_mpi(local_count: int) -> None:
    if local_count > 1:
        raise ConfigError(
            f"mpirun started {local_count} processes on this node, each of which would start ranks of its own. Write "
            "`mpirun --npernode 1 fleetrun x.py` (MPICH, Intel MPI: `-ppn 1`) to let fleetrun start the ranks, or `mpirun python "
            "x.py` to let mpirun."
        )


def _cluster_port(env: Env, job: str) -> int:
    return _checked_port(env["MASTER_PORT"], "MASTER_PORT") if env.get("MASTER_PORT") else job_port(job)


def _number(env: Env, *names: str, default: int | None = None) -> int:
    """Return the number in the first of these variables that is set."""
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
    """Split "host", "host:6070", "[fe80::1]:6070" or a bare IPv6 address into host and port."""
    match = re.fullmatch(
        r"\[([0-9A-Fa-f:.]+)\](?::(.*))?|([^:/\s\[\]]+)(?::([^:]*))?|([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)", text
    )
    if match is None:
        raise ConfigError(f"--master takes HOST or HOST:PORT, such as 10.0.0.1:{DEFAULT_PORT}; got {text!r}.")
    port = match[2] if match[2] is not None else match[4]
    return match[1] or match[3] or match[5], None if port is None else _checked_port(port, "--master")


def _checked_port(text: str, origin: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) in PORTS):
        raise ConfigError(f"{origin} names the port {text!r}; a port from {PORTS.start} to {PORTS.stop - 1} is needed.")
    return int(text)


def _resolve(name: str, flag: str, machine: Machine) -> str:
    try:
        address = machine.resolve(name)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the address of {name!r} ({flag}) cannot be found: {error}; write its IP address.") from error
    # Many systems map a machine's own name to 127.0.1.1, which other machines cannot reach.
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
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in families]
    with contextlib.suppress(OSError):
        addresses += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    return tuple(dict.fromkeys(address.split("%")[0] for address in addresses))


def _look_up(name: str) -> str:
    if _is_address(name):
        return str(ipaddress.ip_address(name))
    addresses = [(entry[0], str(entry[4][0]).split("%")[0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return min(addresses, key=lambda entry: (_is_loopback(entry[1]), entry[0] != socket.AF_INET))[1]


def _route_to(address: str) -> str | None:
    """Return the own address used to reach another: connecting a datagram socket sends nothing but selects the source."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None
