"""How many bits a parameter travel in an update, and how fast is that between two hosts? Needs root.

    python -m bench.bytes.run                        links of 100 and of 1000 Mbit/s
    python -m bench.bytes.run --rates 100 --rounds 3
    python -m bench.bytes.run --smoke                two local processes and a small network, without root; nothing is kept

The MLP of bench/compression_speed, 10.5 million parameters, in the same turns. A rank of two sends each parameter once to its
owner or once from there: `bits_counted` is what the report counts for one parameter, `bits_on_link` what the counters of the
network interface say, less headers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from bench.compression_speed import run as compression_speed
from bench.compression_speed.contestants import ALONE, BF16, DDP, EIGHT, FOUR
from bench.compression_speed.figures import figures_of
from bench.compression_speed.worker import main as work
from bench.lib.cluster import run_on_hosts
from bench.lib.mlp import USUAL
from bench.lib.netns import cluster, why_not
from bench.lib.results import publish
from bench.localsgd_table.accuracy import free_port, local_rank
from bench.localsgd_table.summary import told
from fleetx.errors import ConfigError, FleetError, LaunchError

NAME = "bytes"
IN_TURNS = (ALONE, DDP, BF16, EIGHT, FOUR)
RATES, ROUNDS = (100.0, 1000.0), 5
NUMBERS = USUAL.weights + USUAL.biases
WANTED = (
    ("100", EIGHT, "times_ddp", 3.5),
    ("100", FOUR, "times_ddp", 6.0),
    ("1000", EIGHT, "times_bf16", 1.0),
    ("1000", FOUR, "times_bf16", 1.0),
)
WORDS = {"times_ddp": "times DDP's throughput", "times_bf16": "times that of bf16_allreduce"}


def measure(rate_mbit: float, rounds: int) -> dict[str, Any]:
    """One cluster of two hosts."""
    with cluster(hosts=2, rate_mbit=rate_mbit) as hosts:
        plan = json.dumps(compression_speed.plan_of(IN_TURNS, rounds))
        ended = run_on_hosts(hosts, Path(compression_speed.WORKER), [plan], timeout=compression_speed.TIMEOUT_SECONDS, shows=True)
    if ended.worst:
        raise LaunchError(f"the training between the hosts failed; its output is above. Exit codes: {ended.exit_codes}")
    return {"rate_mbit": rate_mbit, "rows": rows_of(compression_speed.outcome(ended), rate_mbit)}


def rows_of(outcome: Mapping[str, Mapping[str, Any]], rate_mbit: float) -> dict[str, dict[str, Any]]:
    """The figures of each contestant, with its bits a parameter."""
    rows = figures_of(outcome, rate_mbit)
    for row in rows.values():
        link = row["link_bytes_per_step"]
        row["bits_counted"] = round(row["bytes_per_step"] * 8 / NUMBERS, 3)
        row["bits_on_link"] = None if link is None else round(link * 8 / NUMBERS, 3)
        row["times_bf16"] = round(rows[BF16]["step_ms"] / row["step_ms"], 4)
    return rows


def verdicts(links: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for rate, row, figure, least in WANTED:
        if rate in links:
            value = links[rate]["rows"][row][figure]
            wanted = f"{row} at {rate} Mbit/s: at least {least:g} {WORDS[figure]}"
            found[f"{rate} Mbit/s, {row}: {figure}"] = {"wanted": wanted, "numbers": {"measured": value}, "holds": value >= least}
    return found


def show(link: Mapping[str, Any]) -> None:
    print(f"{link['rate_mbit']:g} Mbit/s")
    for name, row in link["rows"].items():
        speed = f"{row['step_ms']:8.1f} ms  {row['times_ddp']:6.2f} x DDP  {row['times_bf16']:6.2f} x bf16"
        print(f"{name:30} {speed}  {row['bits_counted']:7.3f} bits counted, {row['bits_on_link']} on the link")


def smoke_rank(index: int, port: int) -> None:
    os.environ |= {"FLEETX_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    local_rank(index, 2, port)
    work(compression_speed.plan_of(IN_TURNS, 1, compression_speed.SMOKE))


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
    publish(NAME, {"numel": NUMBERS, "batch": USUAL.batch, "rounds": rounds, "links": links, "verdicts": judged})


def flags_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = " ".join(f"{rate:g}" for rate in RATES)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(RATES), metavar="MBIT", help=f"of the links (default: {shown})"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of every contestant (default: {ROUNDS})")
    parser.add_argument("--smoke", action="store_true", help="two local processes and a small network; nothing is kept")
    flags = parser.parse_args(argv)
    if flags.rounds < 1 or not all(0 < rate < float("inf") for rate in flags.rates):
        raise ConfigError(f"--rounds {flags.rounds} --rates {flags.rates}: write at least one round, and rates above 0.")
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
