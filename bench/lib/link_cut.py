"""Cut the link of a host of bench/lib/netns.py for a while: in both directions, or in one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

from bench.lib.netns import Host
from fleetx.errors import LaunchError

DIRECTIONS = ("both", "up", "down")
"""Of what is lost, seen from the host: what it sends and is sent, what it sends, what it is sent."""


@contextlib.contextmanager
def cut(host: Host, direction: str = "both") -> Iterator[None]:
    """Lose every packet silently, as behind a switch that has failed: the host sees no carrier go. For links without a limit."""
    mark, number = host.namespace.rsplit("-", 1)
    ends = {"up": (host.namespace, host.interface), "down": (f"{mark}-bridge", f"port{number}")}
    chosen = [end for name, end in ends.items() if direction in (name, "both")]
    try:
        for namespace, interface in chosen:
            _tc(namespace, "replace", interface, "root", "pfifo", "limit", "0")
        yield
    finally:
        for namespace, interface in chosen:
            _tc(namespace, "del", interface, "root")


def _tc(namespace: str, *words: str) -> None:
    verb, interface, *rest = words
    command = ["tc", "-netns", namespace, "qdisc", verb, "dev", interface, *rest]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"`{' '.join(command)}` said: {done.stderr.strip()}")
