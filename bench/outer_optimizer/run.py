"""Which outer learning rate goes with which outer momentum, and with which compressed change? Four ranks, a small net, digits.

    python -m bench.outer_optimizer.run

An MLP (64, 128, 128, 10) learns scikit-learn's digits: 1,437 for training, shared out over the ranks in the same order in every
run, 360 held out. SGD with momentum 0.9, its learning rate warmed up over 5 % of the updates, then falling in a line to 0. Each
figure is the mean over the seeds of the loss of the average of all ranks, in nats; smaller is better. It is a small problem: what
the figures show is which settings are much too fast, not which of two good ones is better.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib.results import ROOT, publish
from fleetx.errors import FleetError, LaunchError

WORKER = Path(__file__).with_name("worker.py")
RANKS = 4
TIMEOUT_SECONDS = 1800.0


def measure(updates: int, seeds: int) -> None:
    command = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", str(RANKS), str(WORKER)]
    ended = subprocess.run(
        [*command, str(updates), str(seeds)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False, cwd=ROOT
    )
    if ended.returncode:
        raise LaunchError(f"the trainings failed with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    [told] = [line for line in ended.stdout.splitlines() if line.startswith('{"rows":')]
    rows: dict[str, Any] = json.loads(told)["rows"]
    for row in rows.values():
        for what in ("training", "held_out", "accuracy"):
            row[f"{what}_mean"] = round(statistics.mean(row[what]), 4)
    for name, row in rows.items():
        print(
            f"{name:56} training {row['training_mean']:8.4f}  held out {row['held_out_mean']:7.4f}  "
            f"accuracy {row['accuracy_mean']:6.2f}  {row['bytes'] / 1e3:9.1f} kB a rank"
        )
    publish("outer_optimizer", {"ranks": RANKS, "updates": updates, "seeds": seeds, "rows": rows})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=400, help="of each training (default: 400)")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each kind (default: 2)")
    flags = parser.parse_args(argv)
    try:
        measure(flags.updates, flags.seeds)
    except FleetError as error:
        print(f"outer_optimizer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
