"""N hosts on one machine: network namespaces, each with one link to one bridge, each link as slow as asked. Needs root.

    host 0 [eth0] ---- [port0]+
    host 1 [eth0] ---- [port1]+ bridge       the bridge has a namespace of its own: the machine's firewall, routes and
    host 2 [eth0] ---- [port2]+              addresses touch nothing here, and nothing here touches them

Both ends of a link are limited: what a host sends at its own end, what it is sent at the bridge's. So a link is full duplex, and
several hosts that send to one share its link. A host has its own name, home and TMPDIR too, but the machine's files and cores.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lib.netns_sweep import sweep
from fleetx.errors import ConfigError, LaunchError

NETWORK = "10.213.7"
"""The same for every cluster: no two of them, nor the machine itself, ever see each other's addresses."""
INTERFACE = "eth0"
MOST_HOSTS = 100
RATES_MBIT = (0.1, 100_000)
OFFLOAD_BYTES, LATE_SECONDS = 128 * 2**10, 0.004
QUEUE_SECONDS = 0.05
"""The longest that a packet waits for its turn; beyond that it is dropped, as a switch with a full buffer does."""
FOLDERS = {
    "HOME": ".",
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
}
TOOLS = ("ip", "tc", "unshare", "mount", "sh")
BECOME_HOST = 'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"'
"""The names are this process's and its children's alone: `ip netns exec` gives each its own view of the mounts."""


def burst_bytes(rate_mbit: float) -> int:
    """What a link that was idle sends at once, in no time: as little as possible, or small messages would cost nothing.

    But a packet of segmentation offload, 68 KiB with the headers that are counted, must fit; and where a machine is shared,
    timers are late by some milliseconds, for which a link with less saved up would lose its rate."""
    return max(OFFLOAD_BYTES, math.ceil(rate_mbit * 1e6 / 8 * LATE_SECONDS))


@dataclass(frozen=True)
class Traffic:
    """What a link's own counter has seen."""

    sent_bytes: int
    sent_packets: int


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str
    interface: str
    home: Path

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` on this host. It becomes that process: signals to it arrive there."""
        named = ["unshare", "--uts", "--", "sh", "-c", BECOME_HOST, self.namespace, str(_names_file(self.home.parent))]
        return ["ip", "netns", "exec", self.namespace, *named, *words]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables for a process on this host: those inherited, but with this host's folders and network interface."""
        own = {name: str(self.home / folder) for name, folder in FOLDERS.items()}
        return {**inherited, **own, "GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}

    def traffic(self) -> Traffic:
        shown = _run("ip", "-json", "-statistics", "-netns", self.namespace, "link", "show", "dev", self.interface)
        sent = json.loads(shown)[0]["stats64"]["tx"]
        return Traffic(sent_bytes=sent["bytes"], sent_packets=sent["packets"])

    def tx_bytes(self) -> int:
        """What this host's end of the link has sent, with the headers of Ethernet, IP and TCP."""
        return self.traffic().sent_bytes


def why_not() -> str | None:
    """Why hosts cannot be made here, or None. A cluster of one host is made to find out."""
    if os.geteuid() != 0:
        return "network namespaces need root; run this as root, for instance with sudo"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        needed = "install iproute2 (ip, tc) and util-linux (unshare, mount)"
        return f"network namespaces need {', '.join(f'`{tool}`' for tool in missing)}, not found on PATH; {needed}"
    try:
        with cluster(hosts=1, rate_mbit=1000) as (host,):
            _run(*host.command("true"))
    except LaunchError as error:
        return f"no network namespaces here: {error}"
    return None


@contextlib.contextmanager
def cluster(*, hosts: int, rate_mbit: float | None = None) -> Iterator[list[Host]]:
    """Hosts that reach each other at this rate in each direction (None: no limit), and are gone afterwards.

    Processes that still run on them then are killed. That is another process's doing, so it also happens when this one is
    killed, by whatever signal."""
    _check(hosts, rate_mbit)
    mark = uuid.uuid4().hex[:8]
    folder = Path(tempfile.mkdtemp(prefix=f"fleetx-{mark}-"))
    bridge = f"fleetx-{mark}-bridge"
    made = [Host(f"fleetx-{mark}-{n}", f"{NETWORK}.{n + 1}", INTERFACE, folder / f"host{n}") for n in range(hosts)]
    sweeper = _start_sweeper(folder, names := [bridge, *(host.namespace for host in made)])
    try:
        _furnish(folder, made)
        _build(bridge, made, rate_mbit)
        yield made
    finally:
        sweeper.communicate(b"end\n")
        if sweeper.returncode and not sweep(str(folder), names):
            raise LaunchError(f"not all of the namespaces {', '.join(names)} and of {folder} could be removed.")


def _check(hosts: int, rate_mbit: float | None) -> None:
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MOST_HOSTS:
        raise ConfigError(f"hosts is {hosts!r}; it must be a whole number from 1 to {MOST_HOSTS}.")
    least, most = RATES_MBIT
    if rate_mbit is None:
        return
    if isinstance(rate_mbit, bool) or not isinstance(rate_mbit, int | float) or not least <= rate_mbit <= most:
        raise ConfigError(f"rate_mbit is {rate_mbit!r}; it must be a number from {least} to {most}, or None for no limit.")


def _names_file(folder: Path) -> Path:
    return folder / "hosts"


def _furnish(folder: Path, hosts: Sequence[Host]) -> None:
    """Folders for each, and names for all: without them each connection is looked up at a name server that is not there."""
    for host in hosts:
        for name in FOLDERS.values():
            (host.home / name).mkdir(parents=True, exist_ok=True)
    spelt = ("{}", "::ffff:{}")  # torch's sockets are of IPv6, and look for the second
    names = [("127.0.0.1", "localhost"), *((form.format(host.address), host.namespace) for host in hosts for form in spelt)]
    _names_file(folder).write_text("".join(f"{address} {name}\n" for address, name in names))


def _start_sweeper(folder: Path, names: Sequence[str]) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("netns_sweep.py")
    command = [sys.executable, "-I", "-S", str(script), str(folder), *names]
    silent = subprocess.DEVNULL  # it must not keep open what the owner's readers wait for the end of
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, cwd="/", start_new_session=True)


def _build(bridge: str, hosts: Sequence[Host], rate_mbit: float | None) -> None:
    _run("ip", "netns", "add", bridge)
    _run("ip", "-netns", bridge, "link", "add", "bridge", "up", "type", "bridge")
    for number, host in enumerate(hosts):
        port = f"port{number}"
        _run("ip", "netns", "add", host.namespace)
        cable = ["type", "veth", "peer", "name", host.interface, "netns", host.namespace]
        _run("ip", "-netns", bridge, "link", "add", port, *cable)
        _run("ip", "-netns", bridge, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-netns", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _run("ip", "-netns", host.namespace, "link", "set", host.interface, "up")
        _run("ip", "-netns", host.namespace, "link", "set", "lo", "up")
        if rate_mbit is not None:
            _limit(bridge, port, rate_mbit)
            _limit(host.namespace, host.interface, rate_mbit)
        # Figures are to mean the same on every machine, and this is the one algorithm that each allows in a namespace.
        _run(*host.command("sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"))


def _limit(namespace: str, interface: str, rate_mbit: float) -> None:
    rate = f"{math.ceil(rate_mbit * 1e6)}bit"
    bucket = ["burst", str(burst_bytes(rate_mbit)), "latency", f"{QUEUE_SECONDS * 1e3:.0f}ms"]
    _run("tc", "-netns", namespace, "qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, *bucket)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"`{' '.join(words)}` said: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
