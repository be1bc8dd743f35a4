"""Short runs of bench/soak and bench/nodes: jobs under random faults, cuts and returns end with the bits of a calm run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.lib.netns import why_not

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 1500


def run_bench(*words: str) -> dict[str, Any]:
    """Return the figures on the last line; the bench ends with 1 if a job has failed or has other bits."""
    command = [sys.executable, "-m", *words, "--name", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.parametrize("where", ["hosts", "processes"])
def test_jobs_under_random_faults_end_with_the_bits_of_calm_ones(where: str) -> None:
    if where == "hosts" and (reason := why_not()) is not None:
        pytest.skip(reason)
    flags = ["--jobs", "3", "--job_seconds", "20", "--every", "4", "--seed", "5"]
    figures = run_bench("bench.soak.run", *flags, *(["--processes"] if where == "processes" else []))
    assert (figures["jobs"], figures["differences"], figures["failed"]) == (3, 0, 0)
    assert figures["faults"] > 0


def test_cuts_cost_no_restart_and_a_launcher_started_again_costs_one() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    figures = run_bench(
        "bench.nodes.run", "--cuts", "2", "--longest", "12", "--returns", "2", "--connections", "2000", "--lanes", "2"
    )
    found = [figures[name]["right"] for name in ("cuts_both_ways", "cuts_one_way", "returns")]
    assert found == ["2 of 2"] * 3
    assert figures["flood"]["goes_on"] and figures["flood"]["connections_made"] > 2000
