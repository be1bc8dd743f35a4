"""Control connections between nodes: node 0's launcher (Coordinator) listens on the master address, the others are Members.

Each member sends its state and receives the job, as lines of JSON several times a second; agreement.py defines both. torch's
TCPStore would print a C++ stack trace when node 0 ends, and a call to it can wait for a dead machine for minutes. Here the thread
that watches the workers never waits for the network: it stores its state and reads the last job received.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from .agreement import (
    End,
    Job,
    NodeState,
    Phase,
    all_ready,
    decide,
    fail,
    job_from_line,
    state_from_line,
    to_line,
)

JOIN_SECONDS = 600.0
BEAT_SECONDS = 0.1
SILENCE_SECONDS = 5.0
HINT_SECONDS = 2.0
LINE_BYTES = 1 << 16
Notice = Callable[[str], None]
OpenStore = Callable[[], int]  # opens a new store and returns its port


@dataclass(frozen=True)
class Hello:
    """First message of a node: its flags, which must agree on all nodes, and its address."""

    job_id: str
    node_count: int
    max_restart: int
    process_count: int
    address: str
    rank: int | None = None  # None: take the next free one


def mismatch(first: Hello, other: Hello) -> str | None:
    """Return why two nodes do not belong to one job, as a sentence, or None."""
    flags = {"--job_id": "job_id", "--nnodes": "node_count", "--max_restart": "max_restart"}
    for flag, name in flags.items():
        theirs, ours = getattr(other, name), getattr(first, name)
        if theirs != ours:
            return f"the node at {other.address} has {flag} {theirs}, node 0 has {ours}; start all nodes with the same."
    return None


def assign_rank(hellos: dict[int, Hello], hello: Hello) -> int | str:
    """Return the rank of a node that joins, or a sentence that says why it is refused."""
    count = hellos[0].node_count
    if hello.rank is None:
        free = [rank for rank in range(count) if rank not in hellos]
        return free[0] if free else f"all {count} nodes have joined already; there is no place for {hello.address}."
    if not 0 <= hello.rank < count:
        return f"the node at {hello.address} has rank {hello.rank}; with {count} nodes, ranks are 0 to {count - 1}."
    if hello.rank in hellos:
        taken_by = hellos[hello.rank].address
        return f"the nodes at {taken_by} and {hello.address} both have rank {hello.rank}; give each its own."
    return hello.rank


class Coordinator:
    """Node 0, which decides. As the only node it needs no network."""

    node = 0

    def __init__(
        self, hello: Hello, run_id: str, open_store: OpenStore, notice: Notice, listener: socket.socket | None = None
    ) -> None:
        self._hellos = {0: hello}
        self._states: dict[int, NodeState] = {}
        self._open_store, self._notice = open_store, notice
        self._job = Job(run_id=run_id, process_counts=(hello.process_count,) if hello.node_count == 1 else ())
        self._lock = threading.RLock()
        self._began_seconds = time.monotonic()
        self._has_hinted = False
        self._all_left = threading.Event()
        self._server = _serve(listener, self) if listener is not None else None

    @property
    def process_counts(self) -> tuple[int, ...]:
        return self._job.process_counts

    def exchange(self, state: NodeState) -> Job:
        """Record node 0's state, decide, and return the job."""
        self._limit_joining()
        with self._lock:
            self._states[0] = state
            now_seconds = time.monotonic()
            max_restart = self._hellos[0].max_restart
            self._job = decide(self._job, self._states, max_restart=max_restart, now_seconds=now_seconds)
            if all_ready(self._job, self._states):
                self._job = replace(self._job, port=self._open_store(), nonce=secrets.token_hex(16))
            return self._job

    def _limit_joining(self) -> None:
        """Warn about missing nodes, then fail. Printing is done outside the lock: a blocked console must not block the nodes."""
        waited_seconds = time.monotonic() - self._began_seconds
        if self._job.process_counts or waited_seconds < HINT_SECONDS:
            return
        with self._lock:
            count = self._hellos[0].node_count
            missing = ", ".join(str(rank) for rank in range(count) if rank not in self._hellos)
            if missing and waited_seconds > JOIN_SECONDS:
                self._job = fail(self._job, 0, f"node {missing} of {count} did not join within {JOIN_SECONDS:.0f} s.")
        if missing and not self._has_hinted:
            self._has_hinted = True
            self._notice(f"waiting for node {missing} of {count}")

    def admit(self, hello: Hello) -> int | str:
        """Admit a node and return its rank, or why it is refused. Until all have joined, a mismatch ends the job for all."""
        with self._lock:
            if self._job.end is not None:
                return self._job.sentence or "the job has ended."
            placed = mismatch(self._hellos[0], hello) or assign_rank(self._hellos, hello)
            if isinstance(placed, int):
                self._hellos[placed] = hello
                if len(self._hellos) == hello.node_count:
                    counts = tuple(self._hellos[rank].process_count for rank in range(hello.node_count))
                    self._job = replace(self._job, process_counts=counts)
            elif not self._job.process_counts:
                self._job = fail(self._job, 0, placed)
            return placed

    def update(self, node: int, state: NodeState) -> Job:
        with self._lock:
            self._states[node] = state
            self._check_all_left()
            return self._job

    def mark_gone(self, node: int) -> None:
        """Handle the end of a node's connection: without a goodbye the job fails."""
        with self._lock:
            state = self._states.get(node)
            if state is None or state.phase is not Phase.LEFT:
                sentence = f"node {node} ({self._hellos[node].address}) is gone: its launcher was killed, or cannot be reached."
                self._job = fail(self._job, node, sentence)
                self._states[node] = NodeState(self._job.attempt, Phase.LEFT)
            self._check_all_left()

    def _check_all_left(self) -> None:
        others = [rank for rank in self._hellos if rank != 0]
        if all(rank in self._states and self._states[rank].phase is Phase.LEFT for rank in others):
            self._all_left.set()

    def close(self, state: NodeState, *, limit_seconds: float) -> None:
        """Wait until the other nodes have received the end of the job, then stop listening."""
        if self._server is None:
            return
        self.exchange(state)
        if len(self._hellos) > 1:
            self._all_left.wait(limit_seconds)
        self._server.shutdown()
        self._server.server_close()


def _serve(listener: socket.socket, coordinator: Coordinator) -> socketserver.TCPServer:
    class Handler(socketserver.StreamRequestHandler):
        timeout = SILENCE_SECONDS  # a node that is silent for longer counts as gone
        disable_nagle_algorithm = True

        def handle(self) -> None:
            node: int | None = None
            with contextlib.suppress(Exception):  # a broken connection, or a stranger's: its end is handled below
                placed = coordinator.admit(Hello(**json.loads(self.rfile.readline(LINE_BYTES))))
                self.wfile.write(json.dumps(placed).encode() + b"\n")
                node = placed if isinstance(placed, int) else None
                while node is not None and (line := self.rfile.readline(LINE_BYTES)):
                    self.wfile.write(to_line(coordinator.update(node, state_from_line(line))))
            if node is not None:
                coordinator.mark_gone(node)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a broken connection; its node was marked as gone

    server = Server(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, args=(0.05,), name="fleetrun control", daemon=True).start()
    return server


class Member:
    """Any other node: sends its state and follows node 0."""

    def __init__(self, hello: Hello, master: str, port: int, notice: Notice) -> None:
        self.node: int | None = hello.rank
        self._hello, self._master, self._port, self._notice = hello, master, port, notice
        self._job = Job()
        self._state: NodeState | None = None
        self._has_joined = False
        self._lock = threading.Lock()
        self._has_changed, self._has_left = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="fleetrun control", daemon=True).start()

    @property
    def process_counts(self) -> tuple[int, ...]:
        with self._lock:
            return self._job.process_counts

    def exchange(self, state: NodeState) -> Job:
        """Return the last job received; the state is sent in the background."""
        with self._lock:
            if state != self._state:
                self._state = state
                self._has_changed.set()
            if state.stop_signal is not None and self._job.port is None:  # nothing runs yet: stop without asking node 0
                return replace(self._job, stop_signal=state.stop_signal, end=End.STOPPED)
            return self._job

    def close(self, state: NodeState, *, limit_seconds: float) -> None:
        self.exchange(state)
        self._has_left.wait(limit_seconds)

    def _run(self) -> None:
        try:
            with self._connect() as connection, connection.makefile("rwb") as stream:
                if self._join(stream):
                    self._repeat(stream)
        except Exception as error:  # an invalid answer counts as a lost connection: the watching thread must see the job end
            gone = f"node 0 ({self._master}) is gone: its launcher was killed, or cannot be reached."
            if not self._has_joined:
                gone = f"no fleetrun answers as node 0 at {self._master}:{self._port} ({error})."
            with self._lock:
                stop_signal = self._job.stop_signal or (self._state.stop_signal if self._state is not None else None)
                self._job = fail(replace(self._job, stop_signal=stop_signal), 0, gone)
        finally:
            self._has_left.set()

    def _connect(self) -> socket.socket:
        began_seconds = time.monotonic()
        hint_seconds = began_seconds + HINT_SECONDS
        while True:
            try:
                connection = socket.create_connection((self._master, self._port), timeout=SILENCE_SECONDS)
            except OSError:
                now_seconds = time.monotonic()
                if now_seconds > began_seconds + JOIN_SECONDS:
                    raise
                if now_seconds > hint_seconds:
                    hint_seconds = began_seconds + 2 * JOIN_SECONDS
                    self._notice(f"waiting for node 0 at {self._master}:{self._port}")
                self._has_changed.wait(BEAT_SECONDS)
                self._has_changed.clear()
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection

    def _join(self, stream: io.BufferedRWPair) -> bool:
        answer = json.loads(_request(stream, json.dumps(asdict(self._hello)).encode() + b"\n"))
        if not isinstance(answer, int):
            with self._lock:
                self._job = fail(self._job, 0, str(answer))
            return False
        self.node, self._has_joined = answer, True
        return True

    def _repeat(self, stream: io.BufferedRWPair) -> None:
        while True:
            with self._lock:
                state = self._state
            if state is not None:
                job = job_from_line(_request(stream, to_line(state)))
                with self._lock:
                    self._job = job
                if state.phase is Phase.LEFT:
                    return
            self._has_changed.wait(BEAT_SECONDS)
            self._has_changed.clear()


def _request(stream: io.BufferedRWPair, line: bytes) -> bytes:
    stream.write(line)
    stream.flush()
    answer = stream.readline(LINE_BYTES)
    if not answer:
        raise ConnectionError("closed by node 0")
    return answer
