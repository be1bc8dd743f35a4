"""Ends of control connections for tests: a launcher that says what a test wants, and a wire between two that can be cut."""

from __future__ import annotations

import json
import select
import socket
import threading
from dataclasses import replace
from typing import Any, ClassVar

from fleetx.launch import seal
from fleetx.launch.agreement import NodeState, Phase, to_text
from fleetx.launch.budget import Limits
from fleetx.launch.control import Coordinator, Terms
from fleetx.launch.rendezvous import listen_on
from fleetx.launch.seats import Hello, hello_to_text

SECRET = "0123456789abcdef0123456789abcdef"
HELLO = Hello(node_count=2, max_restart=0, process_count=1, address="127.0.0.1", rank=0)
OTHER = replace(HELLO, rank=1, address="127.0.0.2")
READY, RUNNING = NodeState(0, Phase.READY), NodeState(0, Phase.RUNNING)


def make_terms(secret: str = SECRET, *, job_id: str = "a", grace_seconds: float = 60.0, max_restart: int = 0) -> Terms:
    return Terms(seal.job_key(secret, job_id), bool(secret), grace_seconds, Limits(max_restart))


class Node0:
    """Node 0 of two, without a launcher around it: `exchange` is called by the test."""

    def __init__(self, terms: Terms | None = None, hello: Hello = HELLO) -> None:
        terms = terms or make_terms()
        self.notices: list[str] = []
        self.stores = 0
        listener = listen_on("127.0.0.1")
        self.port = int(listener.getsockname()[1])
        hello = replace(hello, max_restart=terms.limits.max_restart)
        self.coordinator = Coordinator(hello, "run", self._open_store, self.notices.append, listener, terms)
        self.state = READY

    def _open_store(self) -> int:
        self.stores += 1
        return 4000 + self.stores

    def exchange(self, state: NodeState | None = None) -> Any:
        self.state = state or self.state
        return self.coordinator.exchange(self.state)

    def close(self) -> None:
        self.coordinator.close(replace(self.state, phase=Phase.LEFT), limit_seconds=0.0)


class Caller:
    """A launcher, or a stranger, that has connected to node 0. A fixture closes those that a test leaves open."""

    opened: ClassVar[list[Caller]] = []

    def __init__(self, port: int, terms: Terms | None = None) -> None:
        self.terms = terms or make_terms()
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.lines = self.connection.makefile("rb")
        self.opened.append(self)
        self.greeting = seal.read_greeting(self.lines.readline())
        self.session: seal.Session | None = None

    def say_hello(self, hello: Hello | bytes) -> dict[str, Any] | None:
        """Return the answer; None if the hello was not taken as genuine."""
        text = hello if isinstance(hello, bytes) else hello_to_text(hello)
        line, self.session = seal.seal_hello(self.terms.key, self.greeting, text)
        self.connection.sendall(line)
        answer = self.read()
        if answer in (b"", seal.REFUSED):
            return None
        found: dict[str, Any] = json.loads(self.session.open(answer))
        return found

    def tell(self, state: NodeState | bytes) -> dict[str, Any] | None:
        """Send a state and return the job; None if the connection was closed."""
        assert self.session is not None
        text = state if isinstance(state, bytes) else to_text(state)
        self.connection.sendall(self.session.seal(text))
        answer = self.read()
        return json.loads(self.session.open(answer)) if answer else None

    def read(self) -> bytes:
        try:
            return self.lines.readline()
        except ConnectionError:
            return b""

    def is_closed(self) -> bool:
        """Read until the end."""
        while line := self.read():
            assert line
        return True

    def close(self) -> None:
        self.lines.close()
        self.connection.close()


class Relay:
    """A port that leads to another one, until it is cut: connections are reset, or nothing passes any more in one direction."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.passes_up, self.passes_down = True, True
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def reset(self) -> None:
        """Close all connections; new ones are taken."""
        for pair in self._pairs:
            for end in pair:
                end.close()
        self._pairs.clear()

    def close(self) -> None:
        self._listener.close()
        self.reset()

    def _run(self) -> None:
        while self._listener.fileno() >= 0:
            ends = [end for pair in list(self._pairs) for end in pair if end.fileno() >= 0]
            try:
                ready, _, _ = select.select([self._listener, *ends], [], [], 0.02)
                if self._listener in ready:
                    near = self._listener.accept()[0]
                    self._pairs.append((near, socket.create_connection(("127.0.0.1", self._target))))
            except (OSError, ValueError):
                continue
            for near, far in list(self._pairs):
                self._carry(near, far, ready, passes=self.passes_up)
                self._carry(far, near, ready, passes=self.passes_down)

    def _carry(self, source: socket.socket, goal: socket.socket, ready: list[socket.socket], *, passes: bool) -> None:
        if source not in ready or not passes:
            return
        try:
            data = source.recv(1 << 16)
            if data:
                goal.sendall(data)
                return
        except (OSError, ValueError):
            pass
        source.close()
        goal.close()
        self._pairs[:] = [pair for pair in self._pairs if source not in pair]
