"""The exit code of fleetrun is that of the rank that caused the end, however the others end and in whatever order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetx.launch.worker import exit_code_of, is_consequence
from tests.helpers.launchers import SOURCE, Launchers, launchers, wait_until

LEAVES = """
import atexit, os, pathlib, sys, time
rank = os.environ["RANK"]
def wait_for(name):
    until = time.monotonic() + 60
    while not pathlib.Path(name).exists() and time.monotonic() < until:
        time.sleep(0.01)
def linger():  # as the end of a process with much in memory, after its connections are closed
    pathlib.Path("closed").touch()
    wait_for("reported")
    time.sleep(0.3)
if rank == "1":
    wait_for("waits")
    if "recorded" in sys.argv:
        atexit.register(linger)
    else:
        linger()
    sys.exit(7)
pathlib.Path("waits").touch()
wait_for("closed")
class PeerError(RuntimeError):
    pass
PeerError.__module__ = "fleetx.errors"
def report():
    pathlib.Path("reported").touch()
atexit.register(report)
raise PeerError("rank 0 has lost the other ranks")
"""
ASKS = f"""
import os, pathlib, sys
sys.path.insert(0, {str(SOURCE)!r})
import torch
from fleetx import fleet
fleet.init()
model = torch.nn.Linear(2, 1)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
while not fleet.should_stop():
    optimizer.minimize(model(torch.ones(2, 2)).sum())
    pathlib.Path("asks." + os.environ["RANK"] + "." + str(os.getpid())).touch()
print("saved", flush=True)
"""


@pytest.fixture(scope="module")
def fleetruns() -> Iterator[Launchers]:
    with launchers() as started:
        yield started


@pytest.mark.parametrize("case", ["recorded", "late"])
def test_the_code_of_a_rank_that_is_still_on_its_way_out_when_others_have_failed_by_it(
    fleetruns: Launchers, tmp_path: Path, case: str
) -> None:
    run = fleetruns.start(tmp_path, LEAVES.replace("sys.argv", repr([case])), "--nproc_per_node=2")
    assert run.wait() == 7, run.told
    assert "rank 1" in run.told.splitlines()[1]


def test_ranks_that_left_because_one_of_them_was_told_to_stop_are_no_success(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, ASKS, "--nproc_per_node=2", "--max_restart=1", OMP_NUM_THREADS="1")
    wait_until(lambda: len(list(tmp_path.glob("asks.*"))) == 2)
    os.kill(int(next(tmp_path.glob("asks.1.*")).suffix[1:]), signal.SIGTERM)
    assert run.wait() == 143, run.told
    assert run.log(0).endswith("saved\n") and run.log(1).endswith("saved\n")
    assert "stopped by SIGTERM" in run.told and "failed" not in run.told


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(3), 3),
        (SystemExit(256 + 3), 3),
        (SystemExit(-1), 255),
        (SystemExit("no such file"), 1),
        (SystemExit(None), 0),
        (KeyboardInterrupt(), 130),
        (ValueError(), 1),
    ],
)
def test_the_recorded_code_is_the_one_that_python_ends_with(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[/pytorch/gloo/tcp/pair.cc:545] Connection closed by peer [127.0.0.1]:4242"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
        (SystemExit(3), False),
    ],
)
def test_a_broken_connection_is_told_from_an_error(error: BaseException, follows: bool) -> None:
    assert is_consequence(error) is follows
