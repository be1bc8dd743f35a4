"""Sign the notes of ranks in torch's store, which other users can write to: who wrote a note, and whether it is the latest.

A note is `<writer> <count> <code> <text>`; the code is an HMAC over key, writer, count and text with a key that fleetrun gives
the ranks of one attempt. Without fleetrun there is no such key: notes then have the same form, and show damage, but not forgery.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import itertools
import os
import time

NOTE_KEY = "FLEETX_NOTE_KEY"
"""Environment variable with the key of this attempt's notes."""
NOTE_BYTES = 1 << 16
"""A longer note is not read as one."""


class NoteBook:
    """Seals this rank's notes and opens those of others."""

    def __init__(self, key: str | None = None) -> None:
        self._given_key = key
        self._counts = itertools.count(time.time_ns())  # goes on in a process that opens a second group
        self._latest: dict[tuple[str, bytes], int] = {}

    def seal(self, name: str, writer: int, text: str) -> str:
        head, count = str(writer).encode(), str(next(self._counts)).encode()
        body = text.encode()
        return b" ".join((head, count, self._code(name, head, count, body), body)).decode()

    def open(self, name: str, note: bytes) -> str | None:
        """Return the text of a note; None if a rank of this attempt did not write it, or has written a later one already."""
        fields = note.split(b" ", 3) if len(note) <= NOTE_BYTES else []
        if len(fields) < 4:
            return None
        writer, count, code, body = fields
        if not hmac.compare_digest(code, self._code(name, writer, count, body)):
            return None
        if int(count) < self._latest.get((name, writer), 0):
            return None
        self._latest[name, writer] = int(count)
        return body.decode()

    @functools.cached_property
    def _key(self) -> bytes:
        """The key, read at the first note: a rank may be forked with this module imported already."""
        return (os.environ.get(NOTE_KEY, "") if self._given_key is None else self._given_key).encode()

    def _code(self, name: str, *parts: bytes) -> bytes:
        whole = b"".join(len(part).to_bytes(8, "big") + part for part in (name.encode(), *parts))
        return hmac.new(self._key, whole, hashlib.sha256).hexdigest().encode()
