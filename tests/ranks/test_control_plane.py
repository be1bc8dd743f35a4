"""The control plane over real sockets: seats, cuts, strangers and attacks, with node 0 and its launchers in this process."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fleetx.launch import seal
from fleetx.launch.agreement import Cause, End, NodeState, Phase
from fleetx.launch.control import WAVE
from fleetx.launch.door import MOST_STRANGERS, WANTED_FILES, raise_file_limit
from fleetx.launch.member import Member
from tests.helpers.control import HELLO, OTHER, READY, RUNNING, SECRET, Caller, Node0, Relay, make_terms
from tests.helpers.launchers import wait_until

FAILED = Cause("rank 0 failed", "rank 0 on node 0 failed", 1, time_ns=1, is_crash=False, is_retryable=True)


@pytest.fixture(autouse=True)
def callers() -> Iterator[None]:
    yield
    while Caller.opened:
        Caller.opened.pop().close()


@pytest.fixture
def node_0() -> Iterator[Node0]:
    made = Node0()
    yield made
    made.close()


def begin(node: Node0, *, max_restart: int = 0) -> Caller:
    """Let node 1 join, and both run."""
    caller = Caller(node.port)
    placed = caller.say_hello(replace(OTHER, max_restart=max_restart))
    assert placed is not None and placed["rank"] == 1
    caller.tell(READY)
    job = node.exchange(READY)
    assert (job.port, job.process_counts) == (4001, (1, 1))
    node.exchange(RUNNING)
    told = caller.tell(RUNNING)
    assert told is not None and told["port"] == 4001
    return caller


def unchanged(node: Node0) -> bool:
    job = node.exchange()
    return (job.end, job.attempt, job.stop_signal, job.port) == (None, 0, None, 4001)


def token_of(node: Node0) -> str:
    return node.coordinator._seats[1].token


# --- seats ----------------------------------------------------------------------------------------------------------------


def test_a_launcher_that_lost_its_connection_has_its_seat_again_and_the_job_goes_on(node_0: Node0) -> None:
    begin(node_0).close()
    wait_until(lambda: node_0.coordinator._seats[1].closed_seconds is not None)
    again = Caller(node_0.port)
    assert again.say_hello(replace(OTHER, token=token_of(node_0), attempt=0)) == {"rank": 1, "token": token_of(node_0)}
    assert again.tell(RUNNING) is not None and unchanged(node_0)


def test_a_second_connection_with_the_token_replaces_the_first(node_0: Node0) -> None:
    first = begin(node_0)
    again = Caller(node_0.port)
    assert again.say_hello(replace(OTHER, token=token_of(node_0))) is not None
    assert first.tell(RUNNING) is None, "closed"
    assert again.tell(RUNNING) is not None and unchanged(node_0)


def test_a_member_whose_connections_are_reset_dials_again_and_nothing_changes(node_0: Node0) -> None:
    relay = Relay(node_0.port)
    notices: list[str] = []
    member = Member(OTHER, "127.0.0.1", relay.port, notices.append, make_terms())
    member.exchange(READY)
    wait_until(lambda: node_0.exchange(READY).port is not None and member.exchange(READY).port is not None)
    node_0.exchange(RUNNING)
    for number in range(3):
        state = replace(RUNNING, step=number + 1)
        relay.reset()
        member.exchange(state)
        wait_until(lambda state=state: node_0.coordinator._states.get(1) == state)  # type: ignore[misc]
        assert unchanged(node_0)
    assert member.node == 1 and member.exchange(RUNNING).end is None
    node_0.exchange(NodeState(0, Phase.DONE))
    member.exchange(NodeState(0, Phase.DONE))
    wait_until(lambda: node_0.exchange().end is End.SUCCEEDED and member.exchange(NodeState(0, Phase.DONE)).end is End.SUCCEEDED)
    member.close(NodeState(0, Phase.LEFT), limit_seconds=20.0)
    relay.close()


@pytest.mark.parametrize("direction", ["passes_up", "passes_down"])
def test_a_wire_that_carries_one_way_only_for_a_while_changes_nothing(node_0: Node0, direction: str) -> None:
    relay = Relay(node_0.port)
    member = Member(OTHER, "127.0.0.1", relay.port, print, make_terms())
    member.exchange(READY)
    wait_until(lambda: node_0.exchange(READY).port is not None and member.exchange(READY).port is not None)
    node_0.exchange(RUNNING)
    member.exchange(RUNNING)
    setattr(relay, direction, False)
    wait_until(lambda: member._away_seconds is not None or not unchanged(node_0))
    setattr(relay, direction, True)
    member.exchange(replace(RUNNING, step=9))
    wait_until(lambda: node_0.coordinator._states[1].step == 9)
    assert unchanged(node_0)
    relay.close()


def test_a_launcher_that_is_killed_and_started_again_is_one_restart_of_all() -> None:
    node_0 = Node0(make_terms(max_restart=2))
    try:
        begin(node_0, max_restart=2).close()
        wait_until(lambda: node_0.coordinator._seats[1].closed_seconds is not None)
        again = Caller(node_0.port)
        placed = again.say_hello(replace(OTHER, max_restart=2))
        assert placed is not None and placed["rank"] == 1
        told = again.tell(READY)
        assert told is not None and (told["attempt"], told["port"], told["tries"]["spent"]) == (1, None, 1)
        job = node_0.exchange(RUNNING)
        assert (job.attempt, job.port, job.end) == (1, None, None) and job.reason.startswith("node 1 (127.0.0.2) is gone")
        node_0.exchange(NodeState(1, Phase.READY))
        again.tell(NodeState(1, Phase.READY))
        assert node_0.exchange().port == 4002
    finally:
        node_0.close()


def test_a_lost_node_is_awaited_for_the_next_attempt_and_may_come_back_itself() -> None:
    node_0 = Node0(make_terms(max_restart=1, grace_seconds=0.3))
    try:
        begin(node_0, max_restart=1).close()
        wait_until(lambda: node_0.exchange(RUNNING).attempt == 1)
        token = token_of(node_0)
        node_0.exchange(NodeState(1, Phase.READY))
        assert node_0.exchange().port is None, "it waits"
        again = Caller(node_0.port)
        assert again.say_hello(replace(OTHER, max_restart=1, token=token, attempt=0)) is not None
        told = again.tell(RUNNING)
        assert told is not None and told["attempt"] == 1
        again.tell(NodeState(1, Phase.READY))
        assert node_0.exchange().port == 4002
    finally:
        node_0.close()


def test_a_node_that_was_lost_and_is_back_is_told_of_the_end_like_any_other() -> None:
    """Node 0 waits for it at the end, also where the connection that it had before was closed while it was lost."""
    node_0 = Node0(make_terms(max_restart=1, grace_seconds=0.3))
    silent = begin(node_0, max_restart=1)
    wait_until(lambda: node_0.exchange(RUNNING).attempt == 1)
    silent.close()
    wait_until(lambda: node_0.coordinator._seats[1].closed_seconds is not None)
    again = Caller(node_0.port)
    assert again.say_hello(replace(OTHER, max_restart=1, token=token_of(node_0), attempt=0)) is not None
    for phase in (Phase.READY, Phase.RUNNING, Phase.DONE):
        assert again.tell(NodeState(1, phase)) is not None
        node_0.exchange(NodeState(1, phase))
    assert node_0.exchange().end is End.SUCCEEDED
    left = NodeState(1, Phase.LEFT)
    closing = threading.Thread(target=lambda: node_0.coordinator.close(left, limit_seconds=60.0))
    closing.start()
    for _ in range(20):
        told = again.tell(NodeState(1, Phase.DONE))
        assert told is not None and told["end"] == End.SUCCEEDED.value, "node 0 has left before"
    again.tell(left)
    closing.join(60.0)
    assert not closing.is_alive()


def test_a_lost_node_ends_a_job_without_restarts_in_one_sentence() -> None:
    node_0 = Node0(make_terms(grace_seconds=0.3))
    try:
        begin(node_0).close()
        wait_until(lambda: node_0.exchange(RUNNING).end is End.FAILED)
        assert node_0.exchange().sentence.startswith("node 1 (127.0.0.2) is gone: its launcher was killed, or cannot be reached.")
    finally:
        node_0.close()


def test_ranks_that_lost_a_connection_do_not_hide_the_node_that_is_gone() -> None:
    node_0 = Node0(make_terms(grace_seconds=0.5))
    try:
        begin(node_0).close()
        wait_until(lambda: node_0.coordinator._seats[1].closed_seconds is not None)
        broken = replace(FAILED, is_consequence=True)
        wait_until(lambda: node_0.exchange(NodeState(0, Phase.FAILED, broken)).end is not None)
        assert node_0.exchange().sentence.startswith("node 1 (127.0.0.2) is gone")
    finally:
        node_0.close()


def test_a_farewell_leaves_the_whole_grace_to_a_launcher_that_dials_again(node_0: Node0) -> None:
    caller = begin(node_0)
    assert caller.tell(WAVE) is None
    wait_until(lambda: node_0.coordinator._seats[1].closed_seconds is not None)
    seat = node_0.coordinator._seats[1]
    assert seat.has_waved and not seat.is_lost(seat.heard_seconds + 59.0, 60.0)


def test_node_0_started_again_goes_on_with_the_attempt_that_the_others_bring_along() -> None:
    first = Node0(make_terms(max_restart=3))
    notices: list[str] = []
    relay = Relay(first.port)
    member = Member(replace(OTHER, max_restart=3), "127.0.0.1", relay.port, notices.append, make_terms(max_restart=3))
    member.exchange(READY)
    wait_until(lambda: first.exchange(READY).port is not None and member.exchange(READY).port is not None)
    first.coordinator._door.close()  # type: ignore[union-attr]  # as a process that is killed
    second = Node0(make_terms(max_restart=3))
    relay._target = second.port
    try:
        wait_until(lambda: second.exchange(READY).attempt == 1)
        wait_until(lambda: member.exchange(RUNNING).attempt == 1)
        ready = NodeState(1, Phase.READY)
        member.exchange(ready)
        wait_until(lambda: second.exchange(ready).port is not None and member.exchange(ready).port is not None)
        assert second.exchange().tries.spent == 1 and "was started again" in second.exchange().reason
    finally:
        relay.close()
        second.close()


def test_a_stop_is_followed_although_node_0_is_away(node_0: Node0) -> None:
    relay = Relay(node_0.port)
    member = Member(OTHER, "127.0.0.1", relay.port, print, make_terms())
    member.exchange(READY)
    wait_until(lambda: node_0.exchange(READY).port is not None and member.exchange(READY).port is not None)
    relay.close()
    wait_until(lambda: member._away_seconds is not None)
    job = member.exchange(replace(RUNNING, stop_signal=15))
    assert (job.stop_signal, job.stop_node, job.end) == (15, 1, None), "the ranks are told"
    assert member.exchange(NodeState(0, Phase.DONE, stop_signal=15)).end is End.STOPPED


# --- strangers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, ""], ids=["secret", "open"])
@pytest.mark.parametrize("moment", ["joining", "running"])
@pytest.mark.parametrize("stranger", ["another job", "rank 0", "garbage", "escapes"])
def test_a_strange_hello_changes_nothing(moment: str, stranger: str, secret: str) -> None:
    terms = make_terms(secret)
    node_0 = Node0(terms)
    try:
        real = None
        if moment == "running":
            real = Caller(node_0.port, terms)
            assert real.say_hello(OTHER) is not None and real.tell(READY) is not None
            assert node_0.exchange(READY).port is not None
        before = node_0.exchange()
        caller = Caller(node_0.port, make_terms(secret, job_id="b") if stranger == "another job" else make_terms(""))
        escapes = json.dumps({**vars(OTHER), "address": "\x1b]0;owned\x07\x1b[2J"}).encode()
        hellos = {"another job": OTHER, "rank 0": HELLO, "garbage": b"\xff{", "escapes": escapes}
        answer = caller.say_hello(hellos[stranger])
        assert answer is None or "refused" in answer
        after = node_0.exchange()
        assert (after.end, after.attempt, after.process_counts, after.port) == (None, 0, before.process_counts, before.port)
        assert "\x1b" not in "".join(node_0.notices)
        if real is None:
            real = Caller(node_0.port, terms)
            assert real.say_hello(OTHER) == {"rank": 1, "token": token_of(node_0)}
        assert real.tell(READY) is not None
    finally:
        node_0.close()


def test_without_the_secret_no_stranger_takes_a_seat_before_or_after_the_real_node(node_0: Node0) -> None:
    assert Caller(node_0.port, make_terms("")).say_hello(OTHER) is None
    assert Caller(node_0.port, make_terms("another secret of 16 letters")).say_hello(OTHER) is None
    real = begin(node_0)
    assert Caller(node_0.port, make_terms("")).say_hello(replace(OTHER, token=token_of(node_0))) is None, (
        "not even with the token"
    )
    real.close()
    wait_until(lambda: node_0.coordinator._seats[1].closed_seconds is not None)
    assert Caller(node_0.port, make_terms("")).say_hello(OTHER) is None
    assert node_0.exchange(RUNNING).end is None


def test_a_hello_that_was_overheard_cannot_be_sent_again(node_0: Node0) -> None:
    first = Caller(node_0.port)
    line, _ = seal.seal_hello(first.terms.key, first.greeting, b'{"overheard": 1}')
    second = Caller(node_0.port)
    second.connection.sendall(line)
    assert second.read() == seal.REFUSED and second.is_closed()


@pytest.mark.parametrize("kind", ["forged", "repeated", "unsealed"])
def test_a_forged_stop_on_the_connection_of_a_node_stops_nothing(node_0: Node0, kind: str) -> None:
    caller = begin(node_0)
    assert caller.session is not None
    stop = json.dumps({**vars(RUNNING), "stop_signal": 15}).encode()
    if kind == "forged":
        caller.session.key = b"guessed"
        line = caller.session.seal(stop)
    elif kind == "repeated":
        line = caller.session.seal(b"{}")
        caller.session.sent -= 2
        line = caller.session.seal(stop)
    else:
        line = stop + b"\n"
    caller.connection.sendall(line)
    assert caller.is_closed(), "and its launcher dials again"
    assert node_0.exchange(RUNNING).stop_signal is None and node_0.exchange().end is None


@pytest.mark.parametrize(
    "nonsense",
    [b'"nonsense"', b"{}", b"[" * 30_000, b"\xff\xfe", json.dumps({**vars(RUNNING), "attempt": 99}).encode(), b"x" * 80_000],
    ids=["text", "empty", "nested", "bytes", "attempt", "long"],
)
def test_nonsense_from_a_seat_closes_its_connection_and_no_more(node_0: Node0, nonsense: bytes) -> None:
    caller = begin(node_0)
    assert caller.tell(nonsense) is None
    assert unchanged(node_0)
    again = Caller(node_0.port)
    assert again.say_hello(replace(OTHER, token=token_of(node_0))) is not None and again.tell(RUNNING) is not None


def test_a_node_0_that_answers_with_nonsense_is_dialled_again_and_then_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        terms = make_terms(grace_seconds=0.5)
        member = Member(OTHER, "127.0.0.1", listener.getsockname()[1], print, terms)
        member.exchange(READY)
        listener.settimeout(20)
        with listener.accept()[0] as connection:
            connection.sendall(seal.GREETING + b"0" * 32 + b"\n" + b'1 2 "nonsense"\n')
        with listener.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH\n")
        assert member.exchange(READY).end is None, "it has not joined, and waits for node 0"


# --- floods ----------------------------------------------------------------------------------------------------------------


def test_idle_and_slow_connections_are_few_and_short_lived_and_the_real_node_joins(node_0: Node0) -> None:
    idle = [socket.create_connection(("127.0.0.1", node_0.port), timeout=20) for _ in range(3 * MOST_STRANGERS)]
    real = begin(node_0)
    wait_until(lambda: len(node_0.coordinator._door._callers) <= MOST_STRANGERS + 1)  # type: ignore[union-attr]
    slow = Caller(node_0.port)
    began = time.monotonic()
    try:
        while time.monotonic() - began < 60.0:
            slow.connection.sendall(b"x")
            time.sleep(0.2)
            assert real.tell(RUNNING) is not None and unchanged(node_0)
        pytest.fail("a byte now and then keeps a connection open")
    except OSError:
        assert time.monotonic() - began >= 4.0
    for connection in idle:
        connection.close()


def test_a_seat_that_does_not_read_its_answers_is_closed_before_they_fill_the_memory(node_0: Node0) -> None:
    caller = begin(node_0)
    assert caller.session is not None
    line = json.dumps(vars(RUNNING)).encode()
    with pytest.raises(OSError, match="."):
        for _ in range(200_000):
            caller.connection.sendall(caller.session.seal(line))
    assert unchanged(node_0)


def test_running_out_of_files_costs_strangers_their_connections_and_the_job_nothing(node_0: Node0) -> None:
    real = begin(node_0)
    strangers = [Caller(node_0.port) for _ in range(4)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, highest + 64), hard))
        client = socket.socket()
        client.settimeout(20)
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(socket.socket())
        client.connect(("127.0.0.1", node_0.port))
        assert all(stranger.is_closed() for stranger in strangers)
        assert real.tell(RUNNING) is not None and unchanged(node_0)
    finally:
        for one in taken:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert client.recv(64).startswith(seal.GREETING), "taken once there are files again"
    client.close()


def test_the_soft_limit_of_open_files_is_raised_as_far_as_the_hard_one_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest // 2, hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (highest, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
