"""Flags of `fleetx doctor`. The work is in fleetx.doctor, which is imported late since it imports torch."""

from __future__ import annotations

import argparse
from typing import Any

from ..config.kinds import Kind, require
from ..errors import ConfigError
from ..launch.nodes import DEFAULT_PORT, split_master
from .flags import arg_type, count, memory

HELP = "check this machine and a small run of two ranks, and say how to fix each problem"
SIZES = (4, 64 * 1024, 1 << 20, 16 << 20, 64 << 20)
LARGEST_BYTES = 1 << 30
MOST_RANKS = 64

TEXT = """\
Check this machine before training on it: versions, devices, limits, names and addresses, variables that change training;
then start ranks that run all-reduces, check their sums and measure their time. Each problem comes with a fix.
"""
EXAMPLES = """\
examples:
  fleetx doctor
  fleetx doctor --ips 10.0.0.1,10.0.0.2           (can the nodes of a job reach each other?)
  fleetx doctor --json --no-bandwidth             (for scripts: one object on stdout)
  fleetrun --ips 10.0.0.1,10.0.0.2 -m fleetx.cli doctor      (on each node: the time of all-reduces between them)

Exit code: 0 without problems, 1 with some, 2 for flags that cannot be used.
"""


def size_list() -> Kind:
    def parse(text: Any) -> tuple[int, ...]:
        sizes = tuple(memory().parse(entry) for entry in text.split(","))
        require(all(4 <= size <= LARGEST_BYTES and size % 4 == 0 for size in sizes) and sorted(set(sizes)) == list(sizes))
        return sizes

    return Kind("ascending sizes of whole floats of 4 bytes, up to 1 GiB, such as 4B,64KiB,16MiB", parse)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = TEXT, EXAMPLES
    parser.add_argument("--json", action="store_true", help="print one JSON object with all findings, facts and measurements")
    ranks_help = "ranks to start on this machine for the all-reduces (default: 2)"
    parser.add_argument("--ranks", type=arg_type(count(2, MOST_RANKS)), default=2, metavar="N", help=ranks_help)
    sizes_help = "sizes of the all-reduces (default: 4B,64KiB,1MiB,16MiB,64MiB)"
    parser.add_argument("--sizes", type=arg_type(size_list()), default=SIZES, metavar="SIZE,...", help=sizes_help)
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="try only this backend (default: gloo, and NCCL with enough GPUs)"
    )
    parser.add_argument("--no-bandwidth", action="store_true", help="start no ranks")
    parser.add_argument(
        "--limit", type=arg_type(count(1, 3600)), default=60, metavar="SECONDS", help="time limit of the ranks (default: 60)"
    )
    parser.add_argument("--master", metavar="HOST[:PORT]", help="node 0 of a job: can it be reached?")
    parser.add_argument("--ips", metavar="A,B,...", help="all nodes of a job: can they be reached?")


def hosts_of(master: str | None, ips: str | None) -> tuple[tuple[str, ...], int]:
    """Return the hosts to try, and the port that fleetrun would use for its rendezvous."""
    if master is not None and ips is not None:
        raise ConfigError("--ips and --master both say where node 0 is; keep one of them.")
    if master is not None:
        host, port = split_master(master)
        return (host,), port or DEFAULT_PORT
    hosts = tuple(entry.strip() for entry in ips.split(",")) if ips is not None else ()
    if not all(hosts):
        raise ConfigError(f"--ips takes addresses with commas between them, such as 10.0.0.1,10.0.0.2; got {ips!r}.")
    return hosts, DEFAULT_PORT


def run(options: argparse.Namespace) -> int:
    hosts, port = hosts_of(options.master, options.ips)
    from ..doctor import examine  # late: it imports torch, and usage errors should come at once

    return examine.run(
        examine.Request(
            ranks=options.ranks,
            sizes=options.sizes,
            hosts=hosts,
            port=port,
            backend=options.backend,
            wants_bandwidth=not options.no_bandwidth,
            as_json=options.json,
            limit_seconds=float(options.limit),
        )
    )
