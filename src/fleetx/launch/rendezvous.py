"""Rendezvous of the ranks of one attempt: a new store for each attempt, on one address only, behind elastic's interface.

torchrun uses one store for all attempts, on all interfaces of the machine. After a restart a rank may then connect to an address
that a dead rank stored, and any machine of the network may write to the store.
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

from ..errors import LaunchError
from .agreement import Cause, Job, NodeState, Phase
from .control import Coordinator
from .member import Member
from .signals import Signals
from .topology import Nodes

# --- the state of this node in the job ----------------------------------------------------------------------------------


class LocalNode:
    """The state of this node, which its launcher exchanges for that of the job, and its signals to stop."""

    def __init__(self, signals: Signals) -> None:
        self.control: Coordinator | Member  # set once, before the first exchange
        self.attempt = 0
        self.phase = Phase.READY
        self.cause: Cause | None = None
        self.all_wait = False
        self.step = 0
        self.stop_signal: signal.Signals | None = None
        self.is_killed = False
        """Whether a second signal to stop was received: end at once."""
        self._signals = signals

    @property
    def node(self) -> int:
        return self.control.node or 0

    def agree(self) -> Job:
        """Exchange this node's state for the job. Never waits."""
        # Slurm signals the launcher and the ranks: a rank that died of the signal is not a failure.
        for signum in self._signals.take_stops(at_once=self.phase is Phase.FAILED):
            self.is_killed = self.stop_signal is not None
            self.stop_signal = self.stop_signal or signum
        return self.control.exchange(self._state())

    def wants_stacks(self) -> bool:
        return self._signals.take_stacks()

    def agree_ready(self) -> Job:
        """Report READY while waiting for the next attempt, and return the job."""
        self.phase, self.cause, self.all_wait, self.step = Phase.READY, None, False, 0
        job = self.agree()
        self.attempt = job.attempt
        return job

    def leave(self, *, limit_seconds: float) -> None:
        self.phase = Phase.LEFT
        self.control.close(self._state(), limit_seconds=limit_seconds)

    def _state(self) -> NodeState:
        return NodeState(self.attempt, self.phase, self.cause, self.stop_signal, self.all_wait, self.step)


# --- sockets and stores -------------------------------------------------------------------------------------------------

POLL_SECONDS = 0.05
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_of(address: str, interfaces: Mapping[str, list[str]]) -> str | None:
    """Return the name of the interface that owns an address, or None."""
    return next((name for name, addresses in interfaces.items() if address in addresses), None)


def socket_variables(
    address: str, *, is_only_node: bool, interfaces: Mapping[str, list[str]], inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return variables that bind the ranks' sockets to this address; variables set by the user stay.

    Without them gloo listens on the address to which the host name resolves. Between nodes NCCL chooses the fastest network
    itself."""
    name = interface_of(address, interfaces) or (interface_of("127.0.0.1", interfaces) if address.startswith("127.") else None)
    wanted = IFNAMES if is_only_node else IFNAMES[:1]
    return {variable: name for variable in wanted if variable not in inherited} if name is not None else {}


def own_interfaces() -> dict[str, list[str]]:
    return {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}


def listen_on(address: str, port: int = 0) -> socket.socket:
    """Listen on this address only; port 0 takes any free port."""
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
    """Return the process that listens on a port, as "python (process 4711)"; None if this user cannot see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port and entry.pid is not None:
                return f"{psutil.Process(entry.pid).name()} (process {entry.pid})"
    return None


def open_store(address: str) -> TCPStore:
    """Open a store on this address only: the socket is bound here, since torch would bind to all addresses."""
    listener = listen_on(address)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class FreshRendezvous(RendezvousHandler):
    """Opens a new store for each attempt on node 0 once all nodes are ready; the other nodes receive its port."""

    def __init__(self, nodes: Nodes, local_node: LocalNode, run_id: str) -> None:
        self._nodes, self._local_node, self._run_id = nodes, local_node, run_id
        self._store: TCPStore | None = None
        self._job = Job(run_id=run_id)

    @property
    def job(self) -> Job:
        """The job as it was when this attempt began."""
        return self._job

    def open_store(self) -> int:
        self._store = None  # closes the store of the last attempt
        self._store = open_store(self._nodes.address)
        return int(self._store.port)

    def next_rendezvous(self) -> RendezvousInfo:
        """Report this node as ready until all are, then return the store. Raises RendezvousClosedError when the job ends."""
        while True:
            job = self._local_node.agree_ready()
            if job.end is not None:
                raise RendezvousClosedError
            if job.port is not None:
                break
            time.sleep(POLL_SECONDS)
        self._job = job
        # Other nodes give elastic an empty store, which it does not read, since ranks are numbered here. A connection to node
        # 0's store would print C++ stack traces on the console when node 0 ends.
        store: Store = self._store if self._store is not None else HashStore()
        return RendezvousInfo(
            PrefixStore(f"{job.nonce}/{job.attempt}", store),
            self._local_node.node,
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
        pass  # only node 0 ends the job

    def num_nodes_waiting(self) -> int:
        return 0  # the number of nodes is fixed

    def shutdown(self) -> bool:
        self._store = None
        return True
