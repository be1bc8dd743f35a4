"""The control port of node 0: takes connections, tells strangers from launchers of the job, and carries lines. One thread.

Anyone who reaches the port may connect. So strangers are few (the oldest makes room), have a few seconds, cost little
(connections are taken at a bounded rate), and see one random number. What launchers say is handled by a Desk (control.py).
"""

from __future__ import annotations

import contextlib
import errno
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from . import seal
from .seal import LINE_BYTES, NotGenuine, Session

MOST_STRANGERS = 64
HELLO_SECONDS = 5.0
TAKEN_PER_SECOND, TAKEN_AT_ONCE = 200.0, 64.0
REST_SECONDS = 0.2
"""How long no connection is taken when files or memory have run out."""
UNSENT_BYTES = 4 * LINE_BYTES
WANTED_FILES = 65536
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_file_limit() -> None:
    """Raise the soft limit of open files: each node and each rank needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(eq=False)
class Caller:
    """One connection."""

    connection: socket.socket
    address: str
    nonce: bytes
    deadline_seconds: float  # for the hello
    session: Session | None = None  # once the hello was found genuine
    node: int | None = None  # once it has a seat
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    is_ending: bool = False  # close it when everything is sent


class Desk(Protocol):
    """Handles what launchers say. Each method returns the answer, or None to close the connection."""

    def greet(self, caller: Caller, text: bytes) -> bytes | None: ...

    def hear(self, caller: Caller, text: bytes) -> bytes | None: ...

    def turn_away(self, caller: Caller) -> None:
        """Take note of a hello that is not genuine."""

    def hang_up(self, caller: Caller) -> None:
        """Take note that the connection of a seat is closed."""


class Door:
    def __init__(self, listener: socket.socket, key: bytes, desk: Desk, clock: Callable[[], float] = time.monotonic) -> None:
        listener.setblocking(False)
        self._listener, self._key, self._desk, self._clock = listener, key, desk, clock
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[Caller, None] = {}  # in order of arrival
        self._callers: set[Caller] = set()
        self._allowance, self._refilled_seconds = TAKEN_AT_ONCE, clock()
        self._rests_until_seconds = 0.0
        self._is_listening = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleetrun control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(1.0)

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._listen_if_allowed()
                for key, mask in self._selector.select(0.05):
                    if key.data is None:
                        self._take()
                    else:
                        self._serve(key.data, mask)
                now_seconds = self._clock()
                for caller in [one for one in self._strangers if one.deadline_seconds < now_seconds]:
                    self._drop(caller)
        finally:
            for caller in list(self._callers):
                caller.connection.close()
            self._selector.close()
            self._listener.close()

    def _listen_if_allowed(self) -> None:
        """Watch the listener while connections may be taken. Otherwise they wait in the kernel, whose queue is bounded."""
        now_seconds = self._clock()
        refill = (now_seconds - self._refilled_seconds) * TAKEN_PER_SECOND
        self._allowance, self._refilled_seconds = min(TAKEN_AT_ONCE, self._allowance + refill), now_seconds
        may = now_seconds >= self._rests_until_seconds and self._allowance >= (
            1.0 if self._is_listening else TAKEN_PER_SECOND / 20
        )
        if may and not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._is_listening and not may:
            self._selector.unregister(self._listener)
        self._is_listening = may

    def _take(self) -> None:
        while self._allowance >= 1.0:
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._rests_until_seconds = self._clock() + REST_SECONDS
                    for caller in list(self._strangers):
                        self._drop(caller)
                return  # otherwise it was closed by its other end already
            self._allowance -= 1.0
            self._begin(connection, str(address[0]))

    def _begin(self, connection: socket.socket, address: str) -> None:
        if len(self._strangers) >= MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))
        nonce, greeting = seal.make_greeting()
        caller = Caller(connection, address, nonce, self._clock() + HELLO_SECONDS)
        self._strangers[caller] = None
        self._callers.add(caller)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, caller)
        except OSError:
            return self._drop(caller)
        self._send(caller, greeting)

    def _serve(self, caller: Caller, mask: int) -> None:
        if caller not in self._callers:
            return  # dropped since the selector reported it
        if mask & selectors.EVENT_WRITE:
            self._flush(caller)
        if mask & selectors.EVENT_READ and caller in self._callers:
            self._receive(caller)

    def _receive(self, caller: Caller) -> None:
        try:
            data = caller.connection.recv(LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.incoming += data
        while caller in self._callers and not caller.is_ending and (end := caller.incoming.find(b"\n")) >= 0:
            line = bytes(caller.incoming[: end + 1])
            del caller.incoming[: end + 1]
            self._handle(caller, line)
        if not data or len(caller.incoming) > LINE_BYTES:
            self._drop(caller)

    def _handle(self, caller: Caller, line: bytes) -> None:
        try:
            if caller.session is None:
                text, caller.session = seal.open_hello(self._key, caller.nonce, line)
                answer = self._desk.greet(caller, text)
                caller.is_ending = caller.node is None  # refused, in words
            else:
                answer = self._desk.hear(caller, caller.session.open(line))
        except (NotGenuine, ValueError):
            if caller.session is None:
                self._desk.turn_away(caller)
                caller.is_ending = True
                return self._send(caller, seal.REFUSED)
            answer = None
        if answer is None:
            return self._drop(caller)
        if caller.node is not None:
            self._strangers.pop(caller, None)
        self._send(caller, caller.session.seal(answer))

    def _send(self, caller: Caller, line: bytes) -> None:
        caller.outgoing += line
        self._flush(caller)

    def _flush(self, caller: Caller) -> None:
        try:
            sent = caller.connection.send(caller.outgoing)
        except BlockingIOError:
            sent = 0
        except OSError:
            return self._drop(caller)
        del caller.outgoing[:sent]
        if len(caller.outgoing) > UNSENT_BYTES or (caller.is_ending and not caller.outgoing):
            return self._drop(caller)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.outgoing else 0)
        self._selector.modify(caller.connection, events, caller)

    def _drop(self, caller: Caller) -> None:
        if caller not in self._callers:
            return
        self._callers.discard(caller)
        self._strangers.pop(caller, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller.node is not None:
            self._desk.hang_up(caller)
