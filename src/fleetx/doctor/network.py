"""Check the machine's name and addresses, and the hosts given by flags. Pure functions of facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from .facts import Facts, Network, Peer
from .finding import Finding, note, ok, problem


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def check_name(facts: Facts) -> Iterable[Finding]:
    """Check that other nodes can reach the address of the host name, as srun, mpirun and torchrun need; fleetrun does not."""
    topic, network = "own name", facts.network
    report = problem if network.peers else note
    interface = interface_of(network, network.outward) or "eth0"
    outward = network.outward or "its address"
    by_hand = f"export GLOO_SOCKET_IFNAME={interface}, as fleetrun does by itself"
    fix = f"write `{outward} {network.hostname}` into /etc/hosts; or {by_hand}"
    if not network.resolved:
        what = f"{network.hostname} cannot be resolved ({network.resolve_error}): started by srun, mpirun or torchrun, ranks "
        yield report(topic, what + "on several nodes would not find each other", fix)
    elif all(is_loopback(address) for address in network.resolved):
        what = f"{network.hostname} resolves to {network.resolved[0]}: started by srun, mpirun or torchrun, ranks would listen "
        yield report(topic, what + "where no other node reaches them", fix)
    elif not set(network.resolved) & {one for addresses in network.interfaces.values() for one in addresses}:
        what = f"{network.hostname} resolves to {network.resolved[0]}, which is no address of this machine"
        yield report(topic, what, fix)
    else:
        yield ok(topic, f"{network.hostname} is {network.resolved[0]}")


def interface_of(network: Network, address: str | None) -> str | None:
    return next((name for name, addresses in network.interfaces.items() if address in addresses), None)


def check_addresses(facts: Facts) -> Iterable[Finding]:
    topic, network = "network", facts.network
    shown = ", ".join(
        f"{name} {addresses[0]}" for name, addresses in network.interfaces.items() if addresses and not is_loopback(addresses[0])
    )
    name = interface_of(network, network.outward)
    if name in network.down:
        yield problem(topic, f"{name}, by which other machines are reached, is down", f"ip link set {name} up")
    if network.outward is not None:
        yield ok(topic, f"others reach this machine at {network.outward} ({shown or 'no interface of its own'})")
    elif network.peers:
        yield problem(
            topic, f"there is no route out of this machine ({shown or 'loopback only'})", "ip route add default via GATEWAY"
        )
    else:
        yield note(topic, f"no route out of this machine ({shown or 'loopback only'}): ranks of one machine need none")


# --- hosts of --master and --ips ----------------------------------------------------------------------------------------


def check_peers(facts: Facts) -> Iterable[Finding]:
    if facts.network.peers_error:
        yield problem("hosts", facts.network.peers_error, "fix the import of torch first")
    for peer in facts.network.peers:
        yield _peer(peer)


def _peer(peer: Peer) -> Finding:
    where = peer.name if peer.address in ("", peer.name) else f"{peer.name} ({peer.address})"
    place = f"{where}, port {peer.port}"
    other_port = "choose another one, the same on all nodes: fleetrun --start_port PORT"
    open_ports = f"open TCP port {peer.port}, and those from 1024 on, between the nodes; gloo and NCCL choose their own"
    match peer.answer:
        case "free":
            return ok("hosts", f"{place}: this machine, and the port is free")
        case "held":
            return problem("hosts", f"{place}: this machine, but {peer.detail}", other_port)
        case "answers":
            return ok("hosts", f"{place}: a process listens there; fleetrun on node 0, if it was started")
        case "refuses":
            return ok("hosts", f"{place}: the host answers, and no process listens there yet")
        case "silent":
            return problem("hosts", f"{place}: no answer; a firewall, or no such machine", open_ports)
        case "unknown name":
            return problem("hosts", f"{place}: {peer.detail}", "write its IP address, or put the name into /etc/hosts")
    return problem("hosts", f"{place}: {peer.detail}", "check the address, the route (ip route get ADDRESS) and the cable")
