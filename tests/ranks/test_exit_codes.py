"""The exit code of fleetrun is that of the rank that caused the end, however the others end and in whatever order."""

from __future__ import annotations

import os
import random
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


ENDS = """
import os, random, signal, sys, time
chance = random.Random(int(sys.argv[1]))
rank, guilty, how, code = int(os.environ["RANK"]), chance.randrange(3), sys.argv[2], int(sys.argv[3])
peers_see_it = chance.random() < 0.5
time.sleep(chance.random() * 0.2)
delays = [chance.random() * 0.3 for _ in range(3)]
if rank != guilty:
    time.sleep(delays[rank] if peers_see_it or how == "well" else 600)
    if how != "well":
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")
    sys.exit(0)
if how == "exit":
    sys.exit(code)
if how == "_exit":
    os._exit(code)
if how == "signal":
    os.kill(os.getpid(), code)
    time.sleep(600)
if how == "raise":
    raise ValueError("of the script")
"""


def _ends(chance: random.Random) -> tuple[str, int, int]:
    """Draw how a rank ends: in which way, with which number, and the exit code of fleetrun."""
    how = chance.choice(["exit", "exit", "_exit", "signal", "raise", "well"])
    if how in ("exit", "_exit"):
        code = chance.choice([2, 3, 7, 42, 100, 255])
        return how, code, code
    if how == "signal":
        signum = chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
        return how, int(signum), 128 + signum
    return how, 0, int(how == "raise")


@pytest.mark.parametrize("times", [8, pytest.param(200, marks=pytest.mark.campaign)])
def test_random_ends_of_a_random_rank_have_the_right_code_each(fleetruns: Launchers, tmp_path: Path, times: int) -> None:
    """Three ranks; the others lose their connection to it before, while or after it ends, or wait for it until they are ended."""
    chance, wrong = random.Random(3), []
    for number in range(times):
        how, code, expected = _ends(chance)
        script = ENDS.replace("sys.argv", repr(["train.py", str(number), how, str(code)]))
        run = fleetruns.start(tmp_path / str(number), script, "--nproc_per_node=3")
        if (found := run.wait()) != expected:
            wrong.append((number, how, code, expected, found, run.told))
    assert not wrong, f"{len(wrong)} of {times}: {wrong[:3]}"


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
