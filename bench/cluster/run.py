"""Run a training script on a cluster of hosts on this machine, at the speed of a real network. Needs root.

    python -m bench.cluster.run --hosts 2 --rate 1000 examples/plain_torch.py --epochs 2
    python -m bench.cluster.run --rate 1000        without a script: what Local SGD keeps of the throughput (bench/localsgd_speed)

Each host is a network namespace with a link of `--rate` Mbit/s to one switch (bench/lib/netns.py), and runs
`fleetrun --ips ... SCRIPT`. The first host is shown; at its end, what each link has sent. The exit code is the worst of all.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from bench.lib.cluster import EXIT_TIMEOUT, Run, run_on_hosts
from bench.lib.link_speed import transfer_seconds
from bench.lib.netns import Host, cluster, why_not
from bench.localsgd_speed.run import measure
from fleetx.errors import ConfigError, FleetError, LaunchError

EXIT_FAILED, EXIT_USAGE, EXIT_CTRL_C, EXIT_TERMINATED = 1, 2, 130, 143
PROBE_SECONDS, UNLIMITED_MBIT = 0.5, 10_000
DEFAULT_RATE_MBIT, DEFAULT_ROUNDS = 1000.0, 7
"""Of the bench that runs without a script."""


def show_hosts(hosts: Sequence[Host], rate_mbit: float | None) -> None:
    """Who they are, what each link was asked to carry, and what one TCP connection gets through two of them."""
    for host in hosts:
        print(f"{host.address} is {host.namespace}", flush=True)
    if len(hosts) == 1:
        return
    payload_bytes = int((rate_mbit or UNLIMITED_MBIT) * 1e6 / 8 * PROBE_SECONDS)
    got_mbit = payload_bytes * 8 / 1e6 / transfer_seconds(hosts[0], hosts[-1], payload_bytes)
    asked = "links without a limit" if rate_mbit is None else f"links of {rate_mbit:g} Mbit/s"
    print(f"{asked}: one TCP connection carries {got_mbit:.1f} Mbit/s", flush=True)


def show_end(run: Run, hosts: Sequence[Host]) -> None:
    for host, sent, code, console in zip(hosts, run.tx_bytes, run.exit_codes, run.consoles, strict=True):
        if code and host is not hosts[0]:  # the first was shown as it ran
            print("".join(f"{host.address}| {line}\n" for line in console.splitlines()), end="")
        ended = "ran out of time" if code == EXIT_TIMEOUT else f"ended with {code}"
        print(f"{host.address} {ended}, its link sent {sent:,} bytes")
    print(f"{run.seconds:.1f} s", flush=True)


def flags_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--rate", type=float, default=None, metavar="MBIT", help="of each link, in Mbit/s (default: no limit)")
    parser.add_argument("--procs", type=int, default=1, help="ranks on each host (default: 1)")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="then all is killed (default: 3600)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its arguments")
    return parser.parse_args(argv)


def run(flags: argparse.Namespace) -> int:
    reason = why_not()
    if reason is not None:
        raise LaunchError(reason)
    if not flags.command:
        measure(rate_mbit=flags.rate or DEFAULT_RATE_MBIT, rounds=DEFAULT_ROUNDS)
        return 0
    script, *args = flags.command
    with cluster(hosts=flags.hosts, rate_mbit=flags.rate) as hosts:
        show_hosts(hosts, flags.rate)
        ended = run_on_hosts(hosts, script, args, procs_per_host=flags.procs, timeout=flags.timeout, shows=True)
        show_end(ended, hosts)
    return ended.worst


def leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_TERMINATED)  # as an exception: when this process has ended, its hosts are gone


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, leave)
    try:
        return run(flags_of(argv))
    except FleetError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("cluster: stopped by Ctrl-C", file=sys.stderr)
        return EXIT_CTRL_C


if __name__ == "__main__":
    sys.exit(main())
