"""Two hosts on one machine: network namespaces joined by a virtual cable, each with an address of its own. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

NETWORK = "10.213.7"


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str | None:
    """Why two hosts cannot be made here, or None."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the `ip` command"
    probe = f"fleetx-probe-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    mark = uuid.uuid4().hex[:6]
    hosts = [Host(f"fleetx-{mark}-{n}", f"{NETWORK}.{n + 1}") for n in range(2)]
    cables = [f"fx{mark}{n}" for n in range(2)]
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, cable in zip(hosts, cables, strict=True):
            _ip("link", "set", cable, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", cable)
            _ip("-n", host.namespace, "link", "set", cable, "up")
        yield hosts
    finally:
        for host in hosts:  # the cable goes with its namespace
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
