"""The short version of bench/faults: ranks are killed, the run restarts, and ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("kill_count", "stop_count"), [(1, 0), pytest.param(3, 1, marks=pytest.mark.campaign)])
def test_killed_runs_restart_and_end_with_the_bits_of_an_undisturbed_one(kill_count: int, stop_count: int) -> None:
    counts = ["--kills", str(kill_count), "--stops", str(stop_count)]
    flags = [*counts, "--torchrun", "0", "--restarts", "0", "--signals", "0", "--name", ""]
    command = [sys.executable, "-m", "bench.faults.run", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    kills = figures["kills"]["fleetrun"]
    assert kills["runs"] == kills["same_bits"] == kill_count, done.stdout
    if stop_count:
        assert figures["stops"]["named"] == figures["stops"]["stacks_of_all_ranks"] == stop_count
