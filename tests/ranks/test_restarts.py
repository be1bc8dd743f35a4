"""fleetrun with ranks that die, stop or fall silent: seen at once, named, restarted or ended."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetx.errors import StrategyConflict
from fleetx.launch.worker import is_retryable
from tests.helpers.launchers import USES_PROGRESS, Launchers, launchers, wait_until

REDUCE_AND_DIE = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
attempt = int(os.environ["FLEETX_ATTEMPT"])
print("attempt", attempt, os.environ["TORCHELASTIC_RESTART_COUNT"], "sum", total.item(), flush=True)
if attempt < 5 and dist.get_rank() == attempt % 2:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""
DIE_ONCE_BESIDE_A_STUBBORN_PEER = (
    USES_PROGRESS
    + """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
attempt, rank = os.environ["FLEETX_ATTEMPT"], os.environ["RANK"]
pathlib.Path(f"started.{attempt}.{rank}").write_text(str(time.time()))
if attempt == "0":
    progress.at_step(812)
    while not pathlib.Path("started.0.0").exists() or not pathlib.Path("started.0.1").exists():
        time.sleep(0.01)
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""
)
STEP_AND_HANG = (
    USES_PROGRESS
    + """
import os, pathlib, sys, time
def spin():
    while True:
        pass
progress.at_step(41)
pathlib.Path(f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
if os.environ["FLEETX_ATTEMPT"] == "1":
    sys.exit()
if os.environ["RANK"] == "1":
    spin()
with progress.during(progress.Phase.WAIT):
    time.sleep(600)
"""
)
STEPS = (
    USES_PROGRESS
    + """
import os, pathlib, time
pathlib.Path(f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
for step in range(1, 250):
    progress.at_step(step)
    time.sleep(0.01)
"""
)


@pytest.fixture(scope="module")
def fleetruns() -> Iterator[Launchers]:
    with launchers() as started:
        yield started


def read_pid(folder: Path, rank: int) -> int:
    path = folder / f"pid.{rank}"
    wait_until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def test_five_kills_in_a_row_are_five_restarts_on_stores_of_their_own(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, REDUCE_AND_DIE, "--nproc_per_node=2", "--max_restart=5")
    assert run.wait(120) == 0, run.told
    for attempt in range(1, 6):
        rank = (attempt - 1) % 2
        assert f"restarting ({attempt} of 5): rank {rank} was killed by SIGKILL" in run.told
    for rank in (0, 1):
        lines = [line for line in run.log(rank).splitlines() if line.startswith(("attempt", "---"))]
        assert [line for line in lines if line[0] == "a"] == [f"attempt {number} {number} sum 3.0" for number in range(6)]
        assert [line.split(",")[0] for line in lines if line[0] == "-"] == [f"--- attempt {n} of 6" for n in range(2, 7)]
    assert run.left_behind() == []


def test_a_dead_rank_is_replaced_although_its_peer_ignores_sigterm(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, DIE_ONCE_BESIDE_A_STUBBORN_PEER, "--nproc_per_node=2", "--max_restart=1")
    assert run.wait() == 0, run.told
    assert "restarting (1 of 1): rank 1 was killed by SIGKILL at step 812\n" in run.told
    assert (tmp_path / "started.1.1").exists() and (tmp_path / "started.1.0").exists()


def test_a_spent_budget_ends_with_the_cause_and_overwritten_logs_hold_the_last_attempt(
    fleetruns: Launchers, tmp_path: Path
) -> None:
    script = "import os\nprint('attempt', os.environ['FLEETX_ATTEMPT'])\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)"
    run = fleetruns.start(tmp_path, script, "--nproc_per_node=2", "--max_restart=2", "--log_overwrite")
    assert run.wait() == 137
    assert run.told.count("restarting (") == 2 and "SIGKILL" in run.told.splitlines()[-1] + run.told
    assert run.log(1) == "attempt 2\n"
    assert run.left_behind() == []


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import surely_not_installed", 1),
        ("import sys\nsys.exit(2)", 2),
        ("compile('x =', 'y', 'exec')", 1),
    ],
)
def test_what_cannot_be_retried_is_not_restarted(fleetruns: Launchers, tmp_path: Path, script: str, code: int) -> None:
    run = fleetruns.start(tmp_path, script, "--nproc_per_node=1", "--max_restart=3")
    assert run.wait() == code
    assert "not restarting: rank 0 failed" in run.told and "restarting (" not in run.told


@pytest.mark.parametrize(
    ("error", "can_retry"),
    [
        (StrategyConflict("dgc and lars"), False),
        (ModuleNotFoundError("no module"), False),
        (IndentationError("unexpected indent"), False),
        (ValueError("no such sample"), True),
        (RuntimeError("connection closed by peer"), True),
    ],
)
def test_errors_of_the_script_itself_are_not_retried(error: Exception, can_retry: bool) -> None:
    assert is_retryable(error) is can_retry


def test_a_stopped_rank_is_named_with_the_stacks_of_both(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, STEPS.replace("250", "25000"), "--nproc_per_node=2")
    pid = read_pid(tmp_path, 1)
    read_pid(tmp_path, 0)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: "rank 1 hangs: stopped (SIGSTOP), at step " in run.told)
    assert run.wait() == 137
    for rank in (0, 1):
        assert "most recent call first" in run.log(rank) and "train.py" in run.log(rank)
    assert run.left_behind() == []


def test_a_stop_of_a_second_is_forgiven(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, STEPS, "--nproc_per_node=2")
    pid = read_pid(tmp_path, 1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.2)  # the length of the stop is what is tested
    os.kill(pid, signal.SIGCONT)
    assert run.wait() == 0, run.told


def test_an_endless_loop_is_named_with_its_step_and_restarted(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, STEP_AND_HANG, "--nproc_per_node=2", "--hang_timeout=3", "--max_restart=1")
    assert run.wait() == 0, run.told
    named, restarted = (line for line in run.told.splitlines() if "rank 1" in line)
    seconds = re.search(r"rank 1 hangs: silent for (\d+) s in the user's code, at step 41; rank 0 waits for it", named)
    assert seconds and int(seconds[1]) >= 3  # more where the launcher had to wait for a core
    assert f"restarting (1 of 1): rank 1 hung at step 41: silent for {seconds[1]} s in the user's code" in restarted
    assert "in spin" in run.log(1) and "most recent call first" in run.log(0)


def test_a_hang_without_a_budget_ends_with_the_rank_that_hung(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, STEP_AND_HANG, "--nproc_per_node=2", "--hang_timeout=1")
    assert run.wait() == 137
    seconds = re.search(r"rank 1 hangs: silent for (\d+) s in the user's code", run.told)
    assert seconds and int(seconds[1]) >= 1
    assert run.left_behind() == []
