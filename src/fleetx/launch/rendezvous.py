"""Where the ranks of an attempt meet: a store made for it alone, on one address only. Elastic's interface, our own rules.

torchrun keeps one store for all attempts, on every interface of the machine. After a restart a rank then dials what a dead
one left there, and anybody on the network may write to it.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import time
from collections.abc import Mapping

import psutil
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousStoreInfo

from fleetx.errors import LaunchError
from fleetx.launch.agreement import Cause, Job, NodeState, Phase
from fleetx.launch.control import Chair, Member
from fleetx.launch.signals import Signals
from fleetx.launch.topology import Nodes

# --- How this node stands in the job: what its launcher tells the others of itself, requests to stop among it -----------


class Standing:
    def __init__(self, signals: Signals) -> None:
        self.party: Chair | Member  # set once, before anything is agreed on
        self.attempt = 0
        self.phase = Phase.READY
        self.cause: Cause | None = None
        self.all_wait = False
        self.stop_signal: signal.Signals | None = None
        self.is_killed = False
        """Asked to stop a second time."""
        self._signals = signals

    @property
    def node(self) -> int:
        return self.party.node or 0

    def agree(self) -> Job:
        """Tell how we stand, and learn how the job does. Never waits."""
        # Slurm signals launcher and ranks alike: a rank that has died of it is no failure.
        for signum in self._signals.take_stops(at_once=self.phase is Phase.FAILED):
            self.is_killed = self.stop_signal is not None
            self.stop_signal = self.stop_signal or signum
        return self.party.exchange(self._state())

    def wants_stacks(self) -> bool:
        return self._signals.take_stacks()

    def agree_ready(self) -> Job:
        """As long as the next attempt is waited for."""
        self.phase, self.cause, self.all_wait = Phase.READY, None, False
        job = self.agree()
        self.attempt = job.attempt
        return job

    def leave(self, *, limit_seconds: float) -> None:
        self.phase = Phase.LEFT
        self.party.close(self._state(), limit_seconds=limit_seconds)

    def _state(self) -> NodeState:
        return NodeState(self.attempt, self.phase, self.cause, self.stop_signal, self.all_wait)


# ----------------------------------------------------------------------------------------------------------------------

POLL_SECONDS = 0.05
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_of(address: str, interfaces: Mapping[str, list[str]]) -> str | None:
    """The name of the interface that owns an address."""
    return next((name for name, addresses in interfaces.items() if address in addresses), None)


def socket_variables(
    address: str, *, is_only_node: bool, interfaces: Mapping[str, list[str]], inherited: Mapping[str, str]
) -> dict[str, str]:
    """Variables that keep the ranks' own sockets on this address; one that the user has set stays.

    Without them gloo listens on whatever this machine's host name resolves to. Between nodes NCCL is left to find the
    fastest network by itself."""
    name = interface_of(address, interfaces) or (interface_of("127.0.0.1", interfaces) if address.startswith("127.") else None)
    wanted = IFNAMES if is_only_node else IFNAMES[:1]
    return {variable: name for variable in wanted if variable not in inherited} if name is not None else {}


def own_interfaces() -> dict[str, list[str]]:
    return {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}


def listen_on(address: str, port: int = 0) -> socket.socket:
    """Listen on this address and no other; port 0 is any free one."""
    family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(_why_not(address, port, error)) from error
    return listener


def _why_not(address: str, port: int, error: OSError) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"{address} cannot be listened on: {error.strerror}. Give an address of this machine."
    holder = holder_of(port)
    why = f"held by {holder}" if holder is not None else "in use"
    return f"port {port} of {address} is {why}. Choose another one, the same on all nodes, or end that process."


def holder_of(port: int) -> str | None:
    """ "python (process 4711)": who listens on a port, as far as this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port and entry.pid is not None:
                return f"{psutil.Process(entry.pid).name()} (process {entry.pid})"
    return None


def open_store(address: str) -> TCPStore:
    """A store that listens on this address only: the socket is bound before torch, which would bind to all, gets it."""
    listener = listen_on(address)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class FreshRendezvous(RendezvousHandler):
    """A new store for each attempt: on node 0 it is opened here, once all nodes are ready; the others are told where."""

    def __init__(self, nodes: Nodes, standing: Standing, run_id: str) -> None:
        self._nodes, self._standing, self._run_id = nodes, standing, run_id
        self._store: TCPStore | None = None
        self._job = Job(run_id=run_id)

    def open_store(self) -> int:
        self._store = None  # that of the attempt before closes
        self._store = open_store(self._nodes.address)
        return int(self._store.port)

    def next_rendezvous(self) -> RendezvousInfo:
        """Say that this node is ready until all are; a request to stop, and any end of the job, ends the waiting."""
        while True:
            job = self._standing.agree_ready()
            if job.end is not None:
                raise RendezvousClosedError
            if job.port is not None:
                break
            time.sleep(POLL_SECONDS)
        self._job = job
        # On other nodes elastic is given an empty store. It asks nothing of it, since we number the ranks; a connection
        # to node 0's would only print C++ stacks on the console when that goes.
        store: Store = self._store if self._store is not None else HashStore()
        return RendezvousInfo(
            PrefixStore(f"{job.nonce}/{job.attempt}", store),
            self._standing.node,
            len(job.process_counts),
            RendezvousStoreInfo(self._nodes.master, job.port),
        )

    @property
    def use_agent_store(self) -> bool:
        return True  # ranks connect to this attempt's store; none of them opens one

    def get_backend(self) -> str:
        return "fleetrun"

    def get_run_id(self) -> str:
        return self._job.run_id or self._run_id

    def is_closed(self) -> bool:
        return self._job.end is not None

    def set_closed(self) -> None:
        pass  # node 0 alone ends the job

    def num_nodes_waiting(self) -> int:
        return 0  # the number of nodes is fixed

    def shutdown(self) -> bool:
        self._store = None
        return True
