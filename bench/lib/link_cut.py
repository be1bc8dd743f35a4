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
    """Lose every packet silently, as behind a switch that has failed: the host sees no carrier go. For links without a limit.

    All of it happens at the switch. A host whose own queue drops a packet tells TCP so, which then asks again every half second
    and gives the connection up after fifteen times, much sooner than where packets are lost on their way."""
    mark, number = host.namespace.rsplit("-", 1)
    switch, port = f"{mark}-bridge", f"port{number}"
    try:
        if direction in ("down", "both"):
            _run("tc", "-netns", switch, "qdisc", "replace", "dev", port, "root", "pfifo", "limit", "0")
        if direction in ("up", "both"):  # a locked port takes nothing from senders that are not on its list, which is empty
            _run("bridge", "-netns", switch, "link", "set", "dev", port, "learning", "off", "locked", "on")
            _run("ip", "-netns", switch, "link", "set", "dev", port, "type", "bridge_slave", "fdb_flush")
        yield
    finally:
        if direction in ("down", "both"):
            _run("tc", "-netns", switch, "qdisc", "del", "dev", port, "root")
        if direction in ("up", "both"):
            _run("bridge", "-netns", switch, "link", "set", "dev", port, "learning", "on", "locked", "off")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"`{' '.join(command)}` said: {done.stderr.strip()}")
