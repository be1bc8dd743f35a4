"""Which line between two launchers is genuine: HMAC over each, with counters. Pure functions of bytes; docs/control_plane.md.

greeting   node 0 to the launcher that connected   `fleetrun 2 <random>`
hello      the launcher to node 0                  `<random> <mac> <text>`
lines      both ways, from now on                  `<counter> <mac> <text>`, with a key of this connection
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

GREETING = b"fleetrun 2 "
REFUSED = b"refused\n"
"""What node 0 answers to a hello that is not genuine. Not authenticated itself: it is a hint, and no more."""
NONCE_BYTES = 16
LINE_BYTES = 1 << 16


class NotGenuine(Exception):
    """A line was not written by the other end of this connection, or is not the next one."""


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the authentication code of the parts, in hex. Each is preceded by its length, so that no two lists look alike."""
    whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(key, whole, hashlib.sha256).hexdigest().encode()


def job_key(secret: str, job_id: str) -> bytes:
    """Return the key of a job's launchers. Without a secret it depends on the job's name alone, which any user may know."""
    return mac(secret.encode(), b"fleetrun job", job_id.encode())


def note_key(secret: str, job_id: str, nonce: str, attempt: int) -> str:
    """Return the key of the ranks' notes in the store of one attempt; the nonce is of that attempt."""
    return mac(job_key(secret, job_id), b"notes", nonce.encode(), str(attempt).encode()).decode()


def make_greeting() -> tuple[bytes, bytes]:
    """Return a random number and the line that carries it."""
    nonce = secrets.token_hex(NONCE_BYTES).encode()
    return nonce, GREETING + nonce + b"\n"


def read_greeting(line: bytes) -> bytes:
    nonce = line.removeprefix(GREETING).strip()
    if not line.startswith(GREETING) or len(nonce) != 2 * NONCE_BYTES:
        raise NotGenuine
    return nonce


@dataclass
class Session:
    """One connection, seen from one of its ends: seals what this end says, and opens what the other end says."""

    key: bytes
    is_node_0: bool
    sent: int = 0
    received: int = 0

    def seal(self, text: bytes) -> bytes:
        self.sent += 1
        count = str(self.sent).encode()
        return b" ".join((count, mac(self.key, _from(self.is_node_0), count, text), text)) + b"\n"

    def open(self, line: bytes) -> bytes:
        """Return the text of the next line. Raises NotGenuine for a forged one, and for one that was sent before."""
        count, code, text = _split(line)
        if not hmac.compare_digest(code, mac(self.key, _from(not self.is_node_0), count, text)):
            raise NotGenuine
        if count != str(self.received + 1).encode():
            raise NotGenuine
        self.received += 1
        return text


def _from(is_node_0: bool) -> bytes:
    return b"from node 0" if is_node_0 else b"to node 0"


def _split(line: bytes) -> tuple[bytes, bytes, bytes]:
    if not line.endswith(b"\n") or line.count(b" ") < 2:
        raise NotGenuine
    first, code, text = line[:-1].split(b" ", 2)
    return first, code, text


def _session(key: bytes, greeting_nonce: bytes, hello_nonce: bytes, *, is_node_0: bool) -> Session:
    return Session(mac(key, b"session", greeting_nonce, hello_nonce), is_node_0)


def seal_hello(key: bytes, greeting_nonce: bytes, text: bytes) -> tuple[bytes, Session]:
    nonce = secrets.token_hex(NONCE_BYTES).encode()
    line = b" ".join((nonce, mac(key, b"hello", greeting_nonce, nonce, text), text)) + b"\n"
    return line, _session(key, greeting_nonce, nonce, is_node_0=False)


def open_hello(key: bytes, greeting_nonce: bytes, line: bytes) -> tuple[bytes, Session]:
    nonce, code, text = _split(line)
    if len(nonce) != 2 * NONCE_BYTES or not hmac.compare_digest(code, mac(key, b"hello", greeting_nonce, nonce, text)):
        raise NotGenuine
    return text, _session(key, greeting_nonce, nonce, is_node_0=True)
