"""Two hosts on one machine, as bench/netns.py makes them, for tests; skipped where they cannot be made."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))  # the benches are scripts: they import each other by bare names

from netns import Host, cluster, why_not

__all__ = ["Host", "two_hosts"]


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with cluster(hosts=2) as hosts:
        yield hosts
