"""Node 0, which decides: its launcher keeps the seats of the other nodes and the job (Coordinator). The others are in member.py.

Each of them sends its state and receives the job several times a second, through door.py; agreement.py defines both, and
docs/control_plane.md the protocol. torch's TCPStore would print a C++ stack trace when node 0 ends, and a call to it can wait for
a dead machine for minutes. Here the thread that watches the workers never waits for the network: it stores its state and reads
the last job.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .agreement import Cause, End, Job, NodeState, Phase, all_ready, decide, fail, state_from_text, to_text
from .budget import Limits, Tries
from .door import Caller, Door
from .seats import (
    GRACE_SECONDS,
    JOIN_SECONDS,
    Hello,
    Placed,
    Refusal,
    RunningClock,
    Seat,
    gone,
    hello_from_text,
    place,
)

HINT_SECONDS = 2.0
MOST_COMPLAINTS = 5
WAVE = b'"wave"'
"""A launcher says so before it closes a connection to dial again."""
Notice = Callable[[str], None]
OpenStore = Callable[[], int]  # opens a new store and returns its port


@dataclass(frozen=True)
class Terms:
    """What all launchers of a job know before they meet."""

    key: bytes = b""
    is_secret: bool = False  # without a secret, anyone who knows the job's name can make the key
    grace_seconds: float = GRACE_SECONDS
    limits: Limits = field(default_factory=lambda: Limits(0))
    addresses: tuple[str, ...] = ()  # of all nodes; empty: only node 0's is known


class Coordinator:
    """The launcher of node 0. As the only node it needs no network."""

    node = 0

    def __init__(
        self,
        hello: Hello,
        run_id: str,
        open_store: OpenStore,
        notice: Notice,
        listener: socket.socket | None = None,
        terms: Terms | None = None,
    ) -> None:
        self._terms = terms or Terms(limits=Limits(hello.max_restart))
        self._clock = RunningClock(time.monotonic())
        self._seats = {0: Seat(hello, "", hello.address, 0.0)}
        self._states: dict[int, NodeState] = {}
        self._callers: dict[int, Caller] = {}
        self._lost: dict[int, float] = {}  # since when
        self._away: dict[int, str] = {}
        self._open_store, self._notice = open_store, notice
        self._notices: list[str] = []
        self._complaints: set[str] = set()
        self._job = Job(run_id=run_id, process_counts=(hello.process_count,) if hello.node_count == 1 else ())
        self._lock = threading.RLock()
        self._has_hinted = False
        self._all_left = threading.Event()
        self._door = Door(listener, self._terms.key, self) if listener is not None else None

    @property
    def process_counts(self) -> tuple[int, ...]:
        return self._job.process_counts

    @property
    def _own(self) -> Hello:
        return self._seats[0].hello

    def _now(self) -> float:
        return self._clock.at(time.monotonic())

    def exchange(self, state: NodeState) -> Job:
        """Record node 0's state, decide, and return the job."""
        with self._lock:
            now_seconds = self._now()
            self._states[0] = state
            self._limit_joining(now_seconds)
            self._note_lost(now_seconds)
            self._decide(now_seconds)
            if all_ready(self._job, self._states, now_seconds=now_seconds):
                nonce = secrets.token_hex(16)
                self._job = replace(self._job, port=self._open_store(), nonce=nonce, began_seconds=now_seconds)
            job, notices, self._notices = self._job, self._notices, []
        for line in notices:  # outside the lock: a blocked console must not block the nodes
            self._notice(line)
        return job

    def _decide(self, now_seconds: float) -> None:
        states, limits = self._states, self._terms.limits
        self._job = decide(self._job, states, limits=limits, now_seconds=now_seconds, away=self._away)

    def _limit_joining(self, now_seconds: float) -> None:
        """Warn about missing nodes, then fail."""
        if self._job.process_counts or now_seconds < HINT_SECONDS:
            return
        count = self._own.node_count
        addresses = self._terms.addresses
        named = (f"{rank} ({addresses[rank]})" if addresses else str(rank) for rank in range(count) if rank not in self._seats)
        missing = ", ".join(named)
        if missing and now_seconds > JOIN_SECONDS:
            self._job = fail(self._job, 0, f"node {missing} of {count} did not join within {JOIN_SECONDS:.0f} s.")
        if missing and not self._has_hinted:
            self._has_hinted = True
            self._notices.append(f"waiting up to {JOIN_SECONDS:.0f} s for node {missing} of {count}")

    # --- nodes that are away --------------------------------------------------------------------------------------------

    def _note_lost(self, now_seconds: float) -> None:
        for rank, seat in list(self._seats.items()):
            if rank == 0 or self._has_left(rank):
                continue
            self._note_away(rank, seat, now_seconds)
            if not seat.is_lost(now_seconds, self._terms.grace_seconds):
                self._lost.pop(rank, None)
            elif not self._job.process_counts:
                del self._seats[rank]  # it left while the others were still to join: its seat is free
                self._states.pop(rank, None)
            elif rank not in self._lost:
                self._lost[rank] = now_seconds
                self._fail_attempt(rank, now_seconds)
            elif now_seconds - self._lost[rank] > JOIN_SECONDS:
                none_came = f"{gone(rank, seat.hello)} No launcher took its place within {JOIN_SECONDS:.0f} s."
                self._job = fail(self._job, rank, none_came)

    def _note_away(self, rank: int, seat: Seat, now_seconds: float) -> None:
        if not seat.is_away(now_seconds):
            if self._away.pop(rank, None) is not None:
                self._notices.append(f"node {rank} ({seat.hello.address}) is back")
        elif rank not in self._away:
            self._away[rank] = gone(rank, seat.hello)
            grace = f"{self._terms.grace_seconds:g} s"
            self._notices.append(f"node {rank} ({seat.hello.address}) does not answer; it has {grace} to come back")

    def _fail_attempt(self, rank: int, now_seconds: float) -> None:
        """Count a lost node as a failure of the attempt under way. Before all are ready there is none: it is waited for."""
        if self._job.port is not None and self._job.end is None:
            sentence = gone(rank, self._seats[rank].hello)
            cause = Cause(sentence, sentence, 1, time.time_ns(), is_crash=True, is_retryable=True)
            before = self._states.get(rank)
            step = before.step if before is not None else 0
            self._states[rank] = NodeState(self._job.attempt, Phase.FAILED, cause, step=step)
            self._decide(now_seconds)
        if self._job.end is None:
            self._states.pop(rank, None)

    # --- what the door brings -------------------------------------------------------------------------------------------

    def greet(self, caller: Caller, text: bytes) -> bytes:
        """Give a launcher its seat, or tell it why it gets none."""
        hello = hello_from_text(text)
        with self._lock:
            now_seconds = self._now()
            placed = place(self._seats, hello, caller.address, now_seconds=now_seconds, is_secret=self._terms.is_secret)
            if isinstance(placed, Placed) and not placed.is_back and self._job.end is not None:
                placed = Refusal(self._job.sentence or "the job has ended.")
            if isinstance(placed, Refusal):
                return self._refuse(placed, caller)
            caller.node = placed.rank
            self._callers[placed.rank] = caller
            if placed.is_back:
                seat = replace(self._seats[placed.rank], peer=caller.address, heard_seconds=now_seconds)
                self._seats[placed.rank] = replace(seat, closed_seconds=None, has_waved=False)
            else:
                self._seat(placed.rank, hello, caller.address, now_seconds)
            return json.dumps({"rank": placed.rank, "token": self._seats[placed.rank].token}).encode()

    def _seat(self, rank: int, hello: Hello, peer: str, now_seconds: float) -> None:
        """Give a seat to a launcher that was just started. If it had another launcher, which is away, the attempt fails."""
        if rank in self._seats and self._job.process_counts:
            self._fail_attempt(rank, now_seconds)
        self._states.pop(rank, None)
        self._lost.pop(rank, None)
        self._seats[rank] = Seat(hello, secrets.token_hex(16), peer, now_seconds)
        if not self._job.process_counts and len(self._seats) == hello.node_count:
            hellos = [self._seats[node].hello for node in range(hello.node_count)]
            self._job = replace(self._job, process_counts=tuple(one.process_count for one in hellos))
            self._go_on_after(hellos)

    def _go_on_after(self, hellos: list[Hello]) -> None:
        """Go on with the job of an earlier node 0, if the other nodes bring one along."""
        attempts = [hello.attempt for hello in hellos if hello.attempt is not None]
        if not attempts:
            return
        spent = max(hello.spent for hello in hellos) + 1
        if spent > self._terms.limits.max_restart:
            self._job = fail(self._job, 0, gone(0, self._own))
        tries = Tries(spent=spent, in_a_row=1, best_step=max(hello.best_step for hello in hellos))
        reason = f"node 0 ({self._own.address}) was started again"
        self._job = replace(self._job, attempt=max(attempts) + 1, tries=tries, reason=reason)

    def _refuse(self, refusal: Refusal, caller: Caller) -> bytes:
        """Refuse a launcher. Only one that knows the secret can be of this job: until all have joined, it then ends for all."""
        if refusal.is_ours and self._terms.is_secret and not self._job.process_counts:
            self._job = fail(self._job, 0, refusal.sentence)
        elif refusal.is_final:
            self._complain(caller, refusal.sentence)
        return json.dumps({"refused": refusal.sentence, "is_final": refusal.is_final}).encode()

    def turn_away(self, caller: Caller) -> None:
        with self._lock:
            self._complain(caller, "it has another --job_id or job secret, or is no fleetrun")

    def _complain(self, caller: Caller, why: str) -> None:
        """Report a refused connection once for each address, and few in all: a stranger must not fill the console."""
        if caller.address not in self._complaints and len(self._complaints) < MOST_COMPLAINTS:
            self._complaints.add(caller.address)
            self._notices.append(f"refused a connection from {caller.address}: {why}")

    def hear(self, caller: Caller, text: bytes) -> bytes | None:
        """Take the state of a node and return the job; None closes the connection."""
        assert caller.node is not None
        with self._lock:
            node, now_seconds = caller.node, self._now()
            if self._callers.get(node) is not caller:
                return None  # the node has dialled again, or another launcher has its seat
            if text == WAVE:
                self._seats[node] = replace(self._seats[node], has_waved=True)
                return None
            state = state_from_text(text)
            if state.attempt > self._job.attempt:
                raise ValueError("an attempt that was not decided on")
            self._seats[node] = replace(self._seats[node], heard_seconds=now_seconds)
            self._states[node] = state
            self._check_all_left()
            return to_text(self._job)

    def hang_up(self, caller: Caller) -> None:
        with self._lock:
            node = caller.node
            if node is None or self._callers.get(node) is not caller:
                return
            del self._callers[node]
            self._seats[node] = replace(self._seats[node], closed_seconds=self._now())
            self._check_all_left()

    # --- end ------------------------------------------------------------------------------------------------------------

    def _has_left(self, rank: int) -> bool:
        return rank in self._states and self._states[rank].phase is Phase.LEFT

    def _check_all_left(self) -> None:
        """Note whether no node is left to be told of the end. One that was lost may be back by then, and is told too."""
        if all(self._has_left(rank) for rank in self._seats if rank not in (0, *self._lost)):
            self._all_left.set()
        else:
            self._all_left.clear()

    def close(self, state: NodeState, *, limit_seconds: float) -> None:
        """Wait until the other nodes have received the end of the job, then stop listening. After a success a node that is away
        has the rest of its grace."""
        if self._door is None:
            return
        self.exchange(state)
        limit = time.monotonic() + limit_seconds
        with self._lock:
            self._check_all_left()
        while not self._all_left.wait(0.05):
            with self._lock:
                self._note_lost(self._now())
                self._check_all_left()
                waits = self._job.end is End.SUCCEEDED and any(rank not in self._lost for rank in self._away)
            if time.monotonic() > limit and not waits:
                break
        self._door.close()
