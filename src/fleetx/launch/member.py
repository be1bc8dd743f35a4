"""Any node but node 0: its launcher dials node 0, keeps its seat, sends its state and follows the job (Member)."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

from . import seal
from .agreement import End, Job, NodeState, Phase, fail, job_from_text, to_text
from .console import escape
from .control import HINT_SECONDS, WAVE, Notice, Terms
from .seal import LINE_BYTES, NotGenuine, Session
from .seats import SILENCE_SECONDS, WAIT_SECONDS, Hello, RunningClock, gone, hello_to_text, patience_seconds

BEAT_SECONDS = 0.1
DIAL_SECONDS = 2.0
"""Limit of one attempt to connect. The kernel would repeat it after 1, 3, 7, 15 s: too late for a link that is back."""
POLL_SECONDS = 0.25
REDIAL_SECONDS = 0.2
STRANGER_SECONDS = 3.0
"""How long a launcher asks again that node 0 takes for a stranger: another job may just be ending there."""


class _Refused(Exception):
    """Node 0 gave no seat, and says why."""

    def __init__(self, sentence: str, limit_seconds: float) -> None:
        super().__init__(sentence)
        self.limit_seconds = limit_seconds  # how long to ask again


class _Over(Exception):
    """The end of the job for this node, as a sentence."""


class _Wire:
    """One connection to node 0: whole lines, with limits on the clock of this process."""

    def __init__(self, connection: socket.socket, clock: RunningClock) -> None:
        self._connection, self._clock, self._rest = connection, clock, b""
        connection.settimeout(POLL_SECONDS)

    def read(self) -> bytes:
        began_seconds = self._clock.at(time.monotonic())
        while b"\n" not in self._rest:
            try:
                data = self._connection.recv(LINE_BYTES)
            except TimeoutError:
                if self._clock.at(time.monotonic()) - began_seconds > SILENCE_SECONDS:
                    raise
                continue
            if not data:
                raise ConnectionResetError("closed by node 0")
            self._rest += data
            if len(self._rest) > 4 * LINE_BYTES:
                raise NotGenuine
        line, _, self._rest = self._rest.partition(b"\n")
        return line + b"\n"

    def write(self, line: bytes) -> None:
        self._connection.settimeout(SILENCE_SECONDS)
        self._connection.sendall(line)
        self._connection.settimeout(POLL_SECONDS)


class Member:
    def __init__(self, hello: Hello, master: str, port: int, notice: Notice, terms: Terms | None = None) -> None:
        self.node: int | None = hello.rank
        self._hello, self._master, self._port, self._notice = hello, master, port, notice
        self._terms = terms or Terms()
        self._clock = RunningClock(time.monotonic())
        self._job = Job()
        self._state: NodeState | None = None
        self._token = ""
        self._away_seconds: float | None = 0.0  # since when node 0 has not answered; None: it does
        self._refused_seconds: float | None = None  # since when it refuses
        self._is_closed = False  # node 0 closed the connection, or refuses one: its launcher has ended
        self._why: Exception | None = None
        self._has_noticed = False
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
            job = self._job
            if state.stop_signal is None or job.end is not None:
                return job
            if job.port is None:  # nothing runs yet: stop without asking node 0
                return replace(job, stop_signal=state.stop_signal, end=End.STOPPED)
            if self._away_seconds is not None:  # it cannot be asked
                end = End.STOPPED if state.phase in (Phase.DONE, Phase.FAILED) else None
                return replace(job, stop_signal=state.stop_signal, stop_node=self.node or 0, end=end)
            return job

    def close(self, state: NodeState, *, limit_seconds: float) -> None:
        self.exchange(state)
        self._has_left.wait(limit_seconds)

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._try_once():
                self._check_patience()
                self._has_changed.wait(REDIAL_SECONDS)
                self._has_changed.clear()
        except _Over as over:
            self._end(str(over))
        except Exception as error:  # the watching thread must see the job end
            self._end(f"the connection to node 0 failed: {escape(str(error))}")
        finally:
            self._has_left.set()

    def _try_once(self) -> bool:
        """Dial, take the seat, and talk until the job has ended here (True) or the connection is lost (False)."""
        try:
            with self._dial() as connection:
                wire = _Wire(connection, self._clock)
                session = self._take_seat(wire)
                self._set_away(None)
                self._talk(wire, session)
                return True
        except _Refused as refused:
            now_seconds = self._now()
            self._refused_seconds = now_seconds if self._refused_seconds is None else self._refused_seconds
            if now_seconds - self._refused_seconds >= refused.limit_seconds:
                raise _Over(str(refused)) from refused
        except (OSError, NotGenuine, ValueError) as error:
            self._why = error
            self._is_closed = isinstance(error, ConnectionError)
        self._set_away(self._now() if self._away_seconds is None else self._away_seconds)
        return self._job.end is not None or self._is_leaving()

    def _now(self) -> float:
        return self._clock.at(time.monotonic())

    def _set_away(self, since_seconds: float | None) -> None:
        with self._lock:
            was_away, self._away_seconds = self._away_seconds is not None, since_seconds
        if since_seconds is None:
            self._refused_seconds, self._is_closed = None, False
            if was_away and self._has_noticed and self._has_joined:
                self._notice(f"node 0 ({self._master}) is back")
            self._has_noticed = False

    @property
    def _has_joined(self) -> bool:
        return bool(self._job.process_counts)

    def _is_leaving(self) -> bool:
        with self._lock:
            return self._state is not None and self._state.phase is Phase.LEFT

    def _check_patience(self) -> None:
        """Raise once node 0 has been away for too long; before, report it once."""
        if self._away_seconds is None:
            return
        waited_seconds = self._now() - self._away_seconds
        can_restart = self._job.tries.spent < self._hello.max_restart
        joined, grace = self._has_joined, self._terms.grace_seconds
        patience = patience_seconds(has_joined=joined, can_restart=can_restart, is_closed=self._is_closed, grace_seconds=grace)
        if waited_seconds > patience:
            at = f"{self._master}:{self._port}"
            missing = f"no fleetrun answers as node 0 at {at} ({self._why})."
            raise _Over(gone(0, replace(self._hello, address=self._master)) if joined else missing)
        if not self._has_noticed and self._refused_seconds is None and waited_seconds > (0.0 if joined else HINT_SECONDS):
            self._has_noticed = True
            if joined:
                self._notice(f"node 0 ({self._master}) does not answer; it has {patience:g} s to come back")
            else:
                self._notice(f"waiting up to {patience:.0f} s for node 0 at {self._master}:{self._port}")

    def _end(self, sentence: str) -> None:
        with self._lock:
            stop_signal = self._job.stop_signal or (self._state.stop_signal if self._state is not None else None)
            self._job = fail(replace(self._job, stop_signal=stop_signal), 0, sentence)

    def _dial(self) -> socket.socket:
        source = (self._hello.address, 0) if _is_loopback(self._master) and _is_loopback(self._hello.address) else None
        connection = socket.create_connection((self._master, self._port), timeout=DIAL_SECONDS, source_address=source)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _take_seat(self, wire: _Wire) -> Session:
        hello = replace(self._hello, rank=self.node, token=self._token)
        if self._has_joined:
            tries = self._job.tries
            hello = replace(hello, attempt=self._job.attempt, spent=tries.spent, best_step=tries.best_step)
        greeting = seal.read_greeting(wire.read())
        line, session = seal.seal_hello(self._terms.key, greeting, hello_to_text(hello))
        wire.write(line)
        answer = wire.read()
        if answer == seal.REFUSED:
            sentence = f"node 0 at {self._master}:{self._port} does not accept this node: start both with the same"
            raise _Refused(f"{sentence} --job_id and the same job secret.", STRANGER_SECONDS)
        fields = json.loads(session.open(answer))
        if "refused" in fields:
            raise _Refused(escape(str(fields["refused"])), 0.0 if fields.get("is_final") else WAIT_SECONDS)
        self.node, self._token = int(fields["rank"]), str(fields["token"])
        return session

    def _talk(self, wire: _Wire, session: Session) -> None:
        try:
            self._beat(wire, session)
        except TimeoutError:
            # Without this node 0 would take the closed connection for the end of this launcher.
            with contextlib.suppress(OSError):
                wire.write(session.seal(WAVE))
            raise

    def _beat(self, wire: _Wire, session: Session) -> None:
        while True:
            with self._lock:
                state = self._state
            if state is not None:
                wire.write(session.seal(to_text(state)))
                job = job_from_text(session.open(wire.read()))
                with self._lock:
                    self._job = job
                if state.phase is Phase.LEFT:
                    return
            self._has_changed.wait(BEAT_SECONDS)
            self._has_changed.clear()


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
