"""Seats of the nodes at node 0: who takes one, who takes one over, and who is lost. Pure functions of hellos and times.

Times are seconds of a RunningClock, which does not count the time during which this process was stopped.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

SILENCE_SECONDS = 5.0
"""Seconds without a message after which a node counts as away."""
CLOSED_SECONDS = 5.0
"""How long a node may be away whose connection was closed without a farewell: its launcher has ended, or dials again at once."""
GRACE_SECONDS = 60.0
JOIN_SECONDS = 600.0
WAIT_SECONDS = 15.0
"""How long a launcher waits for a seat that is held; the one that holds it may have died without a word."""
GAP_SECONDS = 1.0


class RunningClock:
    """Counts the time during which this process ran: a step of more than a second is a pause, and counts as one."""

    def __init__(self, now_seconds: float) -> None:
        self._last_seconds, self._seconds = now_seconds, 0.0

    def at(self, now_seconds: float) -> float:
        self._seconds += min(max(0.0, now_seconds - self._last_seconds), GAP_SECONDS)
        self._last_seconds = now_seconds
        return self._seconds


@dataclass(frozen=True)
class Hello:
    """First message of a node: its flags, which must agree on all nodes, its address, and what it knows of the job."""

    node_count: int
    max_restart: int
    process_count: int
    address: str
    rank: int | None = None  # None: take the next free one
    token: str = ""  # of the seat that it had; empty: it has just been started
    attempt: int | None = None  # in which it is; None: it has just been started
    spent: int = 0  # restarts made so far, as far as it knows
    best_step: int = 0


def hello_to_text(hello: Hello) -> bytes:
    return json.dumps(asdict(hello)).encode()


def hello_from_text(text: bytes) -> Hello:
    """Parse a hello. Raises ValueError unless every field is there, has its type, and is in its range."""
    try:
        hello = Hello(**json.loads(text))
    except (TypeError, RecursionError) as error:
        raise ValueError("not a hello") from error
    counts = (hello.node_count, hello.max_restart, hello.process_count, hello.spent, hello.best_step)
    optional = (hello.rank, hello.attempt)
    if not all(_is_count(value) for value in (*counts, *(value for value in optional if value is not None))):
        raise ValueError("a number is out of range")
    if not (isinstance(hello.address, str) and isinstance(hello.token, str) and len(hello.token) <= 64):
        raise ValueError("not a text")
    ipaddress.ip_address(hello.address.partition("%")[0])
    return hello


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


@dataclass(frozen=True)
class Seat:
    """The place of one node."""

    hello: Hello
    token: str
    peer: str  # the address from which it was taken
    heard_seconds: float  # when the last message came
    closed_seconds: float | None = None  # when its connection was closed; None: it is open
    has_waved: bool = False  # it said that it dials again, before it closed the connection

    def is_away(self, now_seconds: float) -> bool:
        return self.closed_seconds is not None or now_seconds - self.heard_seconds >= SILENCE_SECONDS

    def is_lost(self, now_seconds: float, grace_seconds: float) -> bool:
        if self.closed_seconds is None or self.has_waved:
            return now_seconds - self.heard_seconds >= grace_seconds
        return now_seconds - self.closed_seconds >= min(CLOSED_SECONDS, grace_seconds)


@dataclass(frozen=True)
class Placed:
    rank: int
    is_back: bool  # the launcher that had the seat has it again


@dataclass(frozen=True)
class Refusal:
    sentence: str
    is_final: bool = True  # False: the launcher may ask again in a moment
    is_ours: bool = False  # a launcher of this job was started differently: until all have joined, the job ends for all


def mismatch(first: Hello, other: Hello) -> str | None:
    """Return why two nodes do not belong to one job, as a sentence, or None."""
    flags = {"--nnodes": "node_count", "--max_restart": "max_restart"}
    for flag, name in flags.items():
        theirs, ours = getattr(other, name), getattr(first, name)
        if theirs != ours:
            return f"the node at {other.address} has {flag} {theirs}, node 0 has {ours}; start all nodes with the same."
    return None


def place(seats: Mapping[int, Seat], hello: Hello, peer: str, *, now_seconds: float, is_secret: bool) -> Placed | Refusal:
    """Return the seat of a launcher that says hello, or why it gets none. Without a secret, a seat stays with its address."""
    own = seats[0].hello
    for taken, seat in seats.items():
        if taken != 0 and hello.token and hmac.compare_digest(seat.token.encode(), hello.token.encode()):
            return Placed(taken, is_back=True)
    sentence = mismatch(own, hello)
    if sentence is not None:
        return Refusal(sentence, is_ours=True)
    rank: int | None = hello.rank if hello.rank is not None else _choose(seats, peer, own.node_count, now_seconds)
    if rank is None:
        return Refusal(f"all {own.node_count} nodes have joined already; there is no place for {hello.address}.", is_final=False)
    if not 0 < rank < own.node_count:
        why = f"ranks are 0 to {own.node_count - 1}" if rank else f"node 0 is the one at {own.address}"
        return Refusal(f"the node at {hello.address} has rank {rank}; with {own.node_count} nodes, {why}.", is_ours=rank != 0)
    return _take(seats.get(rank), rank, hello, peer, now_seconds=now_seconds, is_secret=is_secret)


def _choose(seats: Mapping[int, Seat], peer: str, count: int, now_seconds: float) -> int | None:
    """Return the seat of a launcher without a number: the one that its address had and has left, else a free one, else the
    first that is away, for a machine that replaces another."""
    away = [rank for rank, seat in sorted(seats.items()) if rank != 0 and seat.is_away(now_seconds)]
    own = [rank for rank in away if seats[rank].peer == peer]
    free = [rank for rank in range(count) if rank not in seats]
    return next(iter((*own, *free, *away)), None)


def _take(seat: Seat | None, rank: int, hello: Hello, peer: str, *, now_seconds: float, is_secret: bool) -> Placed | Refusal:
    if seat is None:
        return Placed(rank, is_back=False)
    taken_by = seat.hello.address
    if not seat.is_away(now_seconds):
        sentence = f"the nodes at {taken_by} and {hello.address} both have rank {rank}; give each its own."
        return Refusal(sentence, is_final=False)
    if not is_secret and seat.peer != peer:
        sentence = f"node {rank} was at {taken_by}; to replace it by {hello.address}, start all nodes with --job_secret_file."
        return Refusal(sentence, is_final=False)
    if hello.process_count != seat.hello.process_count:
        counts = f"starts {hello.process_count} ranks, the one before it started {seat.hello.process_count}"
        return Refusal(f"the node at {hello.address} takes the place of node {rank}, but {counts}; start as many.")
    return Placed(rank, is_back=False)


def gone(rank: int, hello: Hello) -> str:
    return f"node {rank} ({hello.address}) is gone: its launcher was killed, or cannot be reached."


def patience_seconds(*, has_joined: bool, can_restart: bool, is_closed: bool, grace_seconds: float) -> float:
    """Return how long a launcher dials node 0. `is_closed`: its connection was closed, and its port refuses another one, which is
    what a launcher that was killed leaves behind; then only one that is started again can help, in the next attempt."""
    if not has_joined:
        return JOIN_SECONDS
    if can_restart:
        return grace_seconds + JOIN_SECONDS
    return min(CLOSED_SECONDS, grace_seconds) if is_closed else grace_seconds
