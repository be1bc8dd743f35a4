"""Two hosts on one machine, as bench/lib/netns.py makes them, for tests; skipped where they cannot be made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from bench.lib.netns import Host, cluster, why_not

__all__ = ["Host", "two_hosts"]


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with cluster(hosts=2) as hosts:
        yield hosts
