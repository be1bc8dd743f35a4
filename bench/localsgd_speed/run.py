"""How much of the throughput without communication does Local SGD keep between two hosts at 1 Gbit/s? Needs root.

    python -m bench.cluster.run                      this, with its defaults: 2 hosts, 1000 Mbit/s
    python -m bench.localsgd_speed.run --rounds 9
    python -m bench.localsgd_speed.run --compressed  a period of 30 in 8 and 4 bits, sparse, and in fragments: 100 Mbit/s

An MLP of 10.5 million parameters, batch 192 (bench/lib/mlp.py). All contestants live in the same two processes and
go in turns, in blocks of 16 steps that end with nothing under way; medians over the rounds. The words of the figures:
    kept     throughput over that without communication in the same run
    limit    k*t / (k*t + bytes/rate): what is left if each averaging stops training for the time its bytes need on the link
    of_limit kept over limit; with overlap a transfer hides behind training, and it may be above 1
    bits     of each parameter in a period: by the reports, and by the counter of the network interface, less headers
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib.cluster import run_on_hosts
from bench.lib.link_speed import transfer_seconds
from bench.lib.mlp import NEVER, USUAL
from bench.lib.netns import cluster, why_not
from bench.lib.results import publish
from fleetx.errors import FleetError, LaunchError

WORKER = Path(__file__).with_name("worker.py")
ALONE = "no communication"
OF_LIMIT = 0.95
WANTED_OF_LIMIT = ("ours fp32 k=4", "ours fp32 k=16", "ours bf16 k=4", "ours bf16 k=16")
WANTED_KEPT = {"ours bf16 k=4 overlap=2": 0.93, "ours bf16 k=16 overlap=4": 0.97}
WANTED_COMPRESSED = {name: 0.95 for name in ("int8 k=30", "int4 k=30", "64 of 4096 k=30")}
WANTED_BITS = {"int8 k=30": 8.2, "int4 k=30": 4.2, "64 of 4096 k=30": 0.23}
TIMEOUT_SECONDS = 1500.0
PROBE_BYTES = 2**26
NUMBERS = USUAL.weights + USUAL.biases


def limit(step_seconds: float, period: int, wire_bytes: int, rate_mbit: float) -> float:
    training = period * step_seconds
    return training / (training + wire_bytes * 8 / (rate_mbit * 1e6))


def figures_of(told: dict[str, Any], rate_mbit: float) -> dict[str, dict[str, Any]]:
    alone = statistics.median(told["samples"][ALONE])
    rows = {}
    for name, samples in told["samples"].items():
        facts, seconds = told["facts"][name], statistics.median(samples)
        bound = limit(alone, facts["period"], facts["wire_bytes"], rate_mbit)
        kept = statistics.median(own / other for own, other in zip(told["samples"][ALONE], samples, strict=True))
        quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [seconds] * 3
        rows[name] = {
            "step_ms": round(seconds * 1e3, 1),
            "step_quartiles_ms": [round(q * 1e3, 1) for q in quartiles[::2]],
            "kept": round(kept, 4),
            "limit": round(bound, 4),
            "of_limit": round(kept / bound, 4),
            "wire_bytes": facts["wire_bytes"],
        }
        if facts["period"] != NEVER and any(facts["counted"]):
            rows[name]["bits_counted"] = round(statistics.median(facts["counted"]) * 8 / facts["periods_of_block"] / NUMBERS, 3)
        links = [sent for sent in facts["on_link"] if sent is not None]
        if facts["period"] != NEVER and links:
            rows[name]["bits_on_link"] = round(statistics.median(links) * 8 * facts["period"] / NUMBERS, 3)
    return rows


def verdicts(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {f"{name}: of the limit": (rows[name]["of_limit"], OF_LIMIT) for name in WANTED_OF_LIMIT}
    found |= {f"{name}: kept": (rows[name]["kept"], wanted) for name, wanted in WANTED_KEPT.items()}
    return {what: {"value": value, "wanted": wanted, "met": value >= wanted} for what, (value, wanted) in found.items()}


def verdicts_of_compressed(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {
        f"{name}: kept": {"value": rows[name]["kept"], "wanted": wanted, "met": rows[name]["kept"] >= wanted}
        for name, wanted in WANTED_COMPRESSED.items()
    }
    for name, most in WANTED_BITS.items():
        bits = rows[name]["bits_counted"]
        found[f"{name}: bits, at most"] = {"value": bits, "wanted": most, "met": bits <= most}
    return found


def measure(*, rate_mbit: float, rounds: int, is_compressed: bool = False) -> None:
    reason = why_not()
    if reason is not None:
        raise LaunchError(reason)
    with cluster(hosts=2, rate_mbit=rate_mbit) as hosts:
        goodput = PROBE_BYTES * 8 / 1e6 / transfer_seconds(hosts[0], hosts[1], PROBE_BYTES)
        ended = run_on_hosts(
            hosts, WORKER, [str(rounds), *(["compressed"] if is_compressed else [])], timeout=TIMEOUT_SECONDS, shows=True
        )
    if ended.worst:
        raise LaunchError("the training between the hosts failed; its output is above. Exit codes: " + str(ended.exit_codes))
    rows = figures_of(json.loads(ended.stdout.strip().splitlines()[-1]), rate_mbit)
    for name, row in rows.items():
        print(
            f"{name:36} {row['step_ms']:8.1f} ms  kept {row['kept']:.3f}  limit {row['limit']:.3f}  of it {row['of_limit']:.3f}"
        )
    judged = (verdicts_of_compressed if is_compressed else verdicts)(rows)
    for what, one in judged.items():
        print(f"{'yes' if one['met'] else 'NO':3} {what} {one['value']:.3f}, wanted {one['wanted']:g}")
    figures = {"rate_mbit": rate_mbit, "goodput_mbit": round(goodput, 1), "rows": rows, "verdicts": judged}
    publish("localsgd_compressed" if is_compressed else "localsgd_speed", figures)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, metavar="MBIT", help="of each link (default: 1000; compressed: 100)")
    parser.add_argument("--compressed", action="store_true", help="measure compressed changes, in periods of 30")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every contestant (default: 7)")
    flags = parser.parse_args(argv)
    try:
        rate = flags.rate or (100.0 if flags.compressed else 1000.0)
        measure(rate_mbit=rate, rounds=flags.rounds, is_compressed=flags.compressed)
    except FleetError as error:
        print(f"localsgd_speed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
