"""The short version of bench/faults.py: ranks are killed, the run restarts, and ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_killed_runs_restart_and_end_with_the_bits_of_an_undisturbed_one() -> None:
    flags = ["--kills", "2", "--torchrun", "0", "--signals", "0", "--stops", "1", "--name", ""]
    command = [sys.executable, str(ROOT / "bench" / "faults.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    kills, stops = figures["kills"]["fleetrun"], figures["stops"]
    assert kills["runs"] == kills["same_bits"] == 2, done.stdout
    assert stops["named"] == stops["stacks_of_all_ranks"] == 1
