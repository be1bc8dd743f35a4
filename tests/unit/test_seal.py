"""Lines between launchers: only what the other end wrote, in its order, is taken."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from fleetx.launch import seal
from fleetx.launch.seal import NotGenuine, Session

KEY = seal.job_key("a secret of the job", "night")


def pair(key: bytes = KEY) -> tuple[Session, Session]:
    """The two ends of a connection, the member's first."""
    nonce, greeting = seal.make_greeting()
    line, member = seal.seal_hello(key, seal.read_greeting(greeting), b"hello")
    text, node_0 = seal.open_hello(key, nonce, line)
    assert text == b"hello"
    return member, node_0


def test_the_code_is_the_hmac_of_the_parts_with_their_lengths() -> None:
    whole = b"\0" * 7 + b"\x01a" + b"\0" * 7 + b"\x02bc"
    assert seal.mac(b"key", b"a", b"bc") == hmac.new(b"key", whole, hashlib.sha256).hexdigest().encode()
    assert seal.mac(b"key", b"ab", b"c") != seal.mac(b"key", b"a", b"bc")


def test_both_ends_understand_each_other() -> None:
    member, node_0 = pair()
    for text in (b"", b"a b c", b"x" * 1000):
        assert node_0.open(member.seal(text)) == text
        assert member.open(node_0.seal(text)) == text


def test_a_hello_needs_the_secret_the_name_of_the_job_and_this_greeting() -> None:
    nonce, _ = seal.make_greeting()
    line, _ = seal.seal_hello(KEY, nonce, b"hello")
    for other in (seal.job_key("another secret", "night"), seal.job_key("a secret of the job", "day"), seal.job_key("", "night")):
        with pytest.raises(NotGenuine):
            seal.open_hello(other, nonce, line)
    with pytest.raises(NotGenuine):
        seal.open_hello(KEY, seal.make_greeting()[0], line)
    assert seal.open_hello(KEY, nonce, line)[0] == b"hello"


def test_a_line_that_was_changed_repeated_left_out_or_turned_back_is_not_taken() -> None:
    member, node_0 = pair()
    first, second = member.seal(b"first"), member.seal(b"second")
    for forged in (first.replace(b"first", b"frist"), second, first[:-1], b"\n", b"1 2\n", b"", node_0.seal(b"first")):
        with pytest.raises(NotGenuine):
            node_0.open(forged)
    assert node_0.open(first) == b"first"
    with pytest.raises(NotGenuine):
        node_0.open(first)
    assert node_0.open(second) == b"second"


def test_a_line_of_another_connection_is_not_taken() -> None:
    with pytest.raises(NotGenuine):
        pair()[1].open(pair()[0].seal(b"stop"))


@pytest.mark.parametrize("line", [b"", b"SSH-2.0-OpenSSH\n", b"fleetrun 2 \n", b"fleetrun 2 " + b"x" * 31 + b"\n"])
def test_what_is_no_greeting_is_not_taken(line: bytes) -> None:
    with pytest.raises(NotGenuine):
        seal.read_greeting(line)


def test_the_key_of_the_notes_is_of_one_attempt() -> None:
    keys = {seal.note_key("s", "night", nonce, attempt) for nonce in ("a", "b") for attempt in (0, 1)}
    assert len(keys) == 4 and len({len(key) for key in keys}) == 1
