"""Which patches of a forward this thread is inside of: one that acts on the outermost call alone asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_who: ContextVar[frozenset[int]] = ContextVar("who", default=frozenset())


def inside() -> frozenset[int]:
    """Ids. Whoever runs a part of a forward later, or in another thread, takes them there."""
    return _who.get()


@contextlib.contextmanager
def as_inside(who: frozenset[int]) -> Iterator[None]:
    before = _who.set(who)
    try:
        yield
    finally:
        _who.reset(before)
