"""The record that a launcher reads."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from fleetx.dist import heartbeat, stop_signal
from fleetx.dist.heartbeat import Phase
from fleetx.launch import worker

TELL = """
import sys, types
from fleetx.dist import heartbeat
assert "torch" not in sys.modules
heartbeat.at_step(812)
with heartbeat.during(heartbeat.Phase.WAIT):
    print("waiting", flush=True)
    sys.stdin.readline()
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_launcher_reads_step_and_phase_of_a_worker_without_asking(tmp_path: Path) -> None:
    path = tmp_path / "record"
    heartbeat.make_file(path)
    assert heartbeat.read(path) is None
    process = subprocess.Popen(
        [sys.executable, "-c", TELL],
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src"), heartbeat.PROGRESS_FILE: str(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        found = heartbeat.read(path)
        assert found is not None and (found.step, found.phase) == (812, Phase.WAIT)
        assert 0 <= found.silent_seconds(time.monotonic_ns()) < 60
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "done\n"
        after = heartbeat.read(path)
        assert after is not None and (after.step, after.phase) == (812, Phase.SCRIPT)
        assert after.since_ns > found.since_ns
        print(file=process.stdin, flush=True)


def test_the_worker_and_the_library_mean_the_same_variable() -> None:
    """worker.py imports nothing of the library, and so has names of its own."""
    assert worker.LAUNCHER_PID == stop_signal.LAUNCHER_PID


def test_a_record_that_is_not_one_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12")
    (tmp_path / "strange").write_bytes(b"\x63" * heartbeat.RECORD_BYTES)
    assert heartbeat.read(tmp_path / "short") is None and heartbeat.read(tmp_path / "strange") is None
