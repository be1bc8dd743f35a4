"""What do random pauses of single hosts cost? Four hosts; the time of a step is set by sleeping. Needs root.

    python -m bench.stragglers.run --steps 320

Each step of each host pauses for two extra steps with probability 0.1 (seeded). Synchronous training waits for the slowest host
in every step; with a period of 16 the hosts wait for the slowest sum of 16. `lost` is the share of the throughput without
pauses that is gone. The reports tell which ranks waited, and for how long.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.lib.cluster import run_on_cluster
from bench.lib.results import publish
from fleetx.errors import FleetError, LaunchError

WORKER = Path(__file__).with_name("worker.py")
HOSTS = 4
WANTED, IDEAL = 0.75, 0.65
TIMEOUT_SECONDS = 600.0


def lost(calm_seconds: float, paused_seconds: float) -> float:
    return 1 - calm_seconds / paused_seconds


def measure(steps: int) -> None:
    ended = run_on_cluster(WORKER, [str(steps)], hosts=HOSTS, rate_mbit=1000, timeout=TIMEOUT_SECONDS)
    if ended.worst:
        raise LaunchError(f"the training between the hosts failed, with {ended.exit_codes}:\n" + ended.consoles[0])
    figures = json.loads(ended.stdout.strip().splitlines()[-1])
    for name, row in figures.items():
        row["lost"] = round(lost(row["calm_seconds"], row["paused_seconds"]), 4)
        waits = ", ".join(f"rank {rank} {seconds:.2f} s" for rank, seconds in row["waited_seconds"].items())
        print(
            f"{name:14} without pauses {row['calm_seconds']:6.2f} s, with {row['paused_seconds']:6.2f} s: lost {row['lost']:.3f}"
        )
        print(f"{'':14} waited, by the reports: {waits or 'not told: no rounds'}")
    ratio = round(figures["localsgd k=16"]["lost"] / figures["synchronous"]["lost"], 4)
    verdict = {"value": ratio, "wanted_at_most": WANTED, "ideal": IDEAL, "met": ratio <= WANTED}
    print(f"{'yes' if verdict['met'] else 'NO'}: k=16 loses {ratio} of what synchronous training loses, wanted at most {WANTED}")
    publish("stragglers", {"steps": steps, "rows": figures, "verdict": verdict})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320, help="of each training (default: 320, twenty periods)")
    flags = parser.parse_args(argv)
    try:
        measure(flags.steps)
    except FleetError as error:
        print(f"stragglers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
