"""bench/sharding: its flags, and that its trainings run."""

import json
import subprocess
import sys

import pytest

from bench.lib.results import ROOT
from bench.sharding import run, worker
from fleetx.errors import ConfigError


def test_a_number_of_rounds_that_times_nothing_is_refused():
    with pytest.raises(ConfigError, match="--rounds is 0; write at least 1"):
        run.flags_of(["--rounds", "0"])


@pytest.mark.campaign
def test_the_steps_run_from_end_to_end_in_small():
    command = [sys.executable, "-m", "bench.sharding.run", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert set(rows) == {worker.DENSE, worker.SHARDED, worker.ZERO}
    assert rows[worker.SHARDED]["bytes_of_dense"] <= worker.GOALS["bytes_of_dense"]
    assert max(rows[worker.SHARDED]["state_bytes"]) < 0.51 * max(rows[worker.DENSE]["state_bytes"])


@pytest.mark.campaign
def test_stage_3_runs_beside_fsdp_in_small():
    command = [sys.executable, "-m", "bench.sharding.run", "--smoke", "--weights"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert set(rows) == {worker.WEIGHTS, worker.FSDP}
    assert rows[worker.WEIGHTS]["bytes_of_fsdp"] == pytest.approx(1.0, abs=0.02)
    assert rows[worker.WEIGHTS]["state_bytes"] == pytest.approx(rows[worker.FSDP]["state_bytes"], rel=0.01)
