"""How much faster is a training between two hosts that compresses its gradients? Needs root.

    python -m bench.compression_speed.run               links of 100 and of 1000 Mbit/s
    python -m bench.compression_speed.run --rates 100 --rounds 3
    python -m bench.compression_speed.run --smoke       two local processes and a small network, without root; nothing is kept

An MLP of 10.5 million parameters, batch 192, SGD with momentum (contestants.py). At each rate all contestants
live in the same two processes and go in turns, in blocks that end with nothing under way; medians over the rounds. torch's
PowerSGD hook with its usual buckets kills its job on gloo: it has a job of its own, and its row tells what became of it.
    times_ddp   throughput, in that of torch's DDP
    of_alone    throughput, in that of the same training without communication
    limit_ms    that step, and then the time which the bytes need on the link; who sends during backward may be below it
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from bench.compression_speed.contestants import IN_TURNS, TORCH_POWERSGD
from bench.compression_speed.figures import complaint, figures_of, show, verdicts
from bench.compression_speed.worker import main as work
from bench.lib.cluster import Run, run_on_hosts
from bench.lib.link_speed import transfer_seconds
from bench.lib.mlp import USUAL, Size
from bench.lib.netns import Host, cluster, why_not
from bench.lib.results import publish
from bench.localsgd_table.accuracy import free_port, local_rank
from bench.localsgd_table.summary import told
from fleetx.errors import ConfigError, FleetError, LaunchError

NAME = "compression_speed"
WORKER = Path(__file__).with_name("worker.py")
SMOKE = Size(width=128, layers=3, batch=8)
RATES, ROUNDS = (100.0, 1000.0), 5
TIMEOUT_SECONDS, PEER_SECONDS = 900.0, 120.0
PROBE_SECONDS = 1.0


def outcome(ended: Run) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def plan_of(names: Sequence[str], rounds: int, size: Size = USUAL) -> dict[str, Any]:
    return {"names": list(names), "rounds": rounds, "size": asdict(size)}


def peer(hosts: Sequence[Host], rounds: int) -> dict[str, Any]:
    plan = json.dumps(plan_of([TORCH_POWERSGD], rounds))
    ended = run_on_hosts(hosts, WORKER, [plan], timeout=PEER_SECONDS)
    if ended.worst:
        silent = f"exit codes {ended.exit_codes} within {PEER_SECONDS:g} s, without a message"
        return {"raised": complaint("\n".join([ended.stdout, *ended.consoles])) or silent}
    return outcome(ended)[TORCH_POWERSGD]


def measure(rate_mbit: float, rounds: int) -> dict[str, Any]:
    """One cluster of two hosts."""
    with cluster(hosts=2, rate_mbit=rate_mbit) as hosts:
        payload_bytes = int(rate_mbit * 1e6 / 8 * PROBE_SECONDS)
        goodput = payload_bytes * 8 / 1e6 / transfer_seconds(hosts[0], hosts[1], payload_bytes)
        print(f"{rate_mbit:g} Mbit/s: one TCP connection carries {goodput:.1f}", flush=True)
        plan = json.dumps(plan_of(IN_TURNS, rounds))
        ended = run_on_hosts(hosts, WORKER, [plan], timeout=TIMEOUT_SECONDS, shows=True)
        if ended.worst:
            raise LaunchError(f"the training between the hosts failed; its output is above. Exit codes: {ended.exit_codes}")
        rows = {**outcome(ended), TORCH_POWERSGD: peer(hosts, rounds)}
    return {"rate_mbit": rate_mbit, "goodput_mbit": round(goodput, 1), "rows": figures_of(rows, rate_mbit)}


def smoke_rank(index: int, port: int) -> None:
    os.environ |= {"FLEETX_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    local_rank(index, 2, port)
    work(plan_of(IN_TURNS, 1, SMOKE))


def bench(rates: Sequence[float], rounds: int) -> None:
    reason = why_not()
    if reason is not None:
        raise LaunchError(reason)
    links = {}
    for rate in rates:
        links[f"{rate:g}"] = measure(rate, rounds)
        show(links[f"{rate:g}"])
    judged = verdicts(links)
    for one in judged.values():
        print(told(one))
    common = {"numel": USUAL.weights + USUAL.biases, "batch": USUAL.batch, "rounds": rounds}
    publish(NAME, {**common, "links": links, "verdicts": judged})


def flags_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = " ".join(f"{rate:g}" for rate in RATES)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(RATES), metavar="MBIT", help=f"of the links (default: {shown})"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of every contestant (default: {ROUNDS})")
    parser.add_argument("--smoke", action="store_true", help="two local processes and a small network; nothing is kept")
    flags = parser.parse_args(argv)
    if flags.rounds < 1:
        raise ConfigError(f"--rounds is {flags.rounds}; write at least 1.")
    for rate in flags.rates:
        if not 0 < rate < float("inf"):
            raise ConfigError(f"--rates names {rate}; a rate is a number of Mbit/s above 0.")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    try:
        flags = flags_of(argv)
        if flags.smoke:
            mp.spawn(smoke_rank, args=(free_port(),), nprocs=2)
        else:
            bench(flags.rates, flags.rounds)
    except FleetError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
