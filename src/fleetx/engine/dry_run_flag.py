"""Whether a rehearsed step is under way: what would talk to other ranks, or take note of data, then does not.

Not of a thread: a GPU's backward runs in another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_depth = 0


def is_on() -> bool:
    return _depth > 0


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
