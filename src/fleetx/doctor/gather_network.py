"""Gather facts of the network: name and addresses of this machine, and whether given hosts answer. All waits are short."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import psutil

from ..errors import FleetError, first_line
from ..launch import nodes
from .facts import Network, Peer

LOOKUP_SECONDS = 3.0
"""Limit of a name lookup: a dead name server would block it for tens of seconds."""
CONNECT_SECONDS = 3.0
T = TypeVar("T")


def ask_within(limit_seconds: float, ask: Callable[[], T]) -> T:
    """Return the answer or raise TimeoutError; the lookup itself cannot be stopped and goes on in its thread."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {limit_seconds:.0f} s")
    return answers[0]


def gather_network(hosts: Sequence[str], port: int, *, has_torch: bool) -> Network:
    name = socket.gethostname()
    resolved, error = _resolved(name)
    machine = nodes.this_machine()
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = {
        interface: tuple(entry.address.split("%")[0] for entry in entries if entry.family in families)
        for interface, entries in psutil.net_if_addrs().items()
    }
    own = {address for addresses in interfaces.values() for address in addresses}
    can_look = has_torch or not hosts
    return Network(
        hostname=name,
        resolved=resolved,
        resolve_error=error,
        interfaces=interfaces,
        down=tuple(name for name, state in psutil.net_if_stats().items() if not state.isup),
        outward=machine.route_to(nodes.OUTSIDE) or next((one for one in sorted(own) if _is_outward(one)), None),
        peers=_peers(hosts, port, own, machine) if can_look else (),
        peers_error="" if can_look else "hosts were not looked at, since torch cannot be imported",
    )


def _is_outward(address: str) -> bool:
    return not address.startswith(("127.", "169.254.", "fe80:")) and address != "::1"


def _resolved(name: str) -> tuple[tuple[str, ...], str]:
    try:
        entries = ask_within(LOOKUP_SECONDS, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        return (), first_line(error)
    return tuple(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in entries)), ""


# --- hosts --------------------------------------------------------------------------------------------------------------


def _peers(hosts: Sequence[str], port: int, own: set[str], machine: nodes.Machine) -> tuple[Peer, ...]:
    """Ask all hosts in parallel, since each may take seconds."""
    peers: dict[int, Peer] = {}

    def ask(place: int, host: str) -> None:
        peers[place] = _peer(host, port, own, machine)

    threads = [threading.Thread(target=ask, args=(place, host), daemon=True) for place, host in enumerate(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(peers[place] for place in range(len(hosts)))


def _peer(host: str, port: int, own: set[str], machine: nodes.Machine) -> Peer:
    try:
        address = ask_within(LOOKUP_SECONDS, lambda: machine.resolve(host))
    except (OSError, UnicodeError) as error:
        return Peer(host, port, "unknown name", detail=f"the name cannot be resolved: {first_line(error)}")
    if address in own or address.startswith("127."):
        return _own_port(host, address, port)
    return _far_port(host, address, port)


def _own_port(host: str, address: str, port: int) -> Peer:
    from ..launch.rendezvous import listen_on  # late: it imports torch

    try:
        listen_on(address, port).close()
    except FleetError as error:
        return Peer(host, port, "held", address, first_line(error).split(". ")[0])
    return Peer(host, port, "free", address)


def _far_port(host: str, address: str, port: int) -> Peer:
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return Peer(host, port, "refuses", address)
    except TimeoutError:
        return Peer(host, port, "silent", address)
    except OSError as error:
        reason = "no route to it" if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else error.strerror or str(error)
        return Peer(host, port, "unreachable", address, reason)
    return Peer(host, port, "answers", address)
