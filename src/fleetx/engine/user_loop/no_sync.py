"""`fleet.no_sync()`: backwards inside leave their gradients local, as under DDP's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_depth = 0
"""How many `no_sync()` are around the present backward. Of the process, and not of a thread: on a GPU, hooks run in a thread of
autograd's."""


def is_on() -> bool:
    """Tell whether gradients of a bare backward stay local now."""
    return _depth > 0


@contextlib.contextmanager
def leave_local() -> Iterator[None]:
    """Leave the gradients of bare backwards local; the next one outside, or step(), reduces them with its own."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
