"""fleetrun and signals, to it at every moment of a run: the right exit code, and nothing left two seconds later.

`python -m tests.ranks.test_signals 10` sends each signal ten times at each moment, at random instants, and prints a table.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.launchers import SOURCE, Launcher, Launchers, launchers, wait_until

EXIT_CODES = {
    signal.SIGTERM: 143,
    signal.SIGUSR1: 143,
    signal.SIGHUP: 129,
    signal.SIGINT: 130,
    signal.SIGKILL: -signal.SIGKILL,
}
MOMENTS = ("start", "step", "save", "restart")
LEFT_SECONDS = 2.0

TRAIN_WITH_CHILDREN = """
import os, pathlib, signal, subprocess, sys, time
rank, attempt = os.environ["RANK"], os.environ["FLEETX_ATTEMPT"]
pathlib.Path("run_folder").write_text(str(pathlib.Path(os.environ["FLEETX_PROGRESS_FILE"]).parents[1]))
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])  # as a data loader's worker
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(f"step.{attempt}.{rank}").touch()
if sys.argv[1:] == ["restart"]:
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
until = time.monotonic() + 0.5
while time.monotonic() < until:
    sum(range(1000))
try:
    pathlib.Path(f"save.{attempt}.{rank}").touch()
    time.sleep(600)
finally:
    pathlib.Path(f"left.{rank}").touch()
"""
ASKS_WHETHER_TO_STOP = f"""
import os, pathlib, signal, sys, time
sys.path.insert(0, {str(SOURCE)!r})
is_asked = []
signal.signal(signal.SIGTERM, lambda *_: is_asked.append(True))
pathlib.Path("asks." + os.environ["RANK"]).touch()
while not is_asked:
    time.sleep(0.01)
if sys.argv[1:] == ["deaf"]:
    time.sleep(600)
time.sleep(0.3)
print("saved", flush=True)
"""


def reach(run: Launcher, moment: str) -> None:
    """Wait until the run is at this moment."""
    folder = run.folder
    if moment == "start":
        wait_until(lambda: len(run.left_behind()) >= 2)  # the guardian, and a worker that has just been made
    elif moment == "restart":
        wait_until((folder / "step.1.1").exists)  # rank 1 dies then, and again and again, until the signal comes
    else:
        wait_until(lambda: all((folder / f"{moment}.0.{rank}").exists() for rank in (0, 1)))
        wait_until(lambda: len(run.left_behind()) == 1 + 2 * 3)  # the guardian, each worker and its two children


def strike(fleetruns: Launchers, folder: Path, moment: str, signum: signal.Signals, delay_seconds: float = 0.0) -> Launcher:
    """Send the signal at this moment of a new run, and check how it ends."""
    script = TRAIN_WITH_CHILDREN.replace("sys.argv[1:]", repr([moment]))
    run = fleetruns.start(folder, script, "--nproc_per_node=2", "--max_restart=1000")
    reach(run, moment)
    time.sleep(delay_seconds)
    run.send(signum)
    wait_until(lambda: not run.is_running() and run.left_behind() == [])  # up to a minute: a busy machine is slow
    assert run.wait() == EXIT_CODES[signum], (moment, signum, run.told)
    run_folder = folder / "run_folder"
    assert not (run_folder.exists() and Path(run_folder.read_text() or "nowhere").exists())
    return run


@pytest.fixture(scope="module")
def fleetruns() -> Iterator[Launchers]:
    with launchers() as started:
        yield started


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("signum", EXIT_CODES, ids=lambda signum: signum.name)
def test_a_signal_ends_the_run_with_its_code_and_leaves_nothing(
    fleetruns: Launchers, tmp_path: Path, moment: str, signum: signal.Signals
) -> None:
    strike(fleetruns, tmp_path, moment, signum)


def test_ctrl_c_lets_the_ranks_clean_up_and_is_told_in_one_line(fleetruns: Launchers, tmp_path: Path) -> None:
    run = strike(fleetruns, tmp_path, "save", signal.SIGINT)
    assert (tmp_path / "left.0").exists() and (tmp_path / "left.1").exists()
    assert run.told.startswith("fleetrun: stopped by Ctrl-C") and len(run.told.splitlines()) == 1
    assert "Traceback" not in run.console


def start_asking(fleetruns: Launchers, folder: Path, *arguments: str) -> Launcher:
    script = ASKS_WHETHER_TO_STOP.replace("sys.argv[1:]", repr(list(arguments)))
    run = fleetruns.start(folder, script, "--nproc_per_node=2", "--max_restart=3")
    wait_until(lambda: all((folder / f"asks.{rank}").exists() for rank in (0, 1)))
    return run


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_ranks_that_listen_to_a_stop_end_by_themselves_and_the_exit_code_still_tells(
    fleetruns: Launchers, tmp_path: Path, signum: signal.Signals
) -> None:
    run = start_asking(fleetruns, tmp_path)
    run.send(signum)
    assert run.wait() == EXIT_CODES[signum]
    assert run.log(0) == run.log(1) == "saved\n"
    assert f"stopping ({signum.name}); send it again to end at once" in run.told


def test_ctrl_c_lets_ranks_that_ask_save_and_leave_and_the_exit_code_is_130(fleetruns: Launchers, tmp_path: Path) -> None:
    run = start_asking(fleetruns, tmp_path)
    run.send(signal.SIGINT)
    assert run.wait() == 130
    assert run.log(0) == run.log(1) == "saved\n"
    assert "press Ctrl-C again to end at once" in run.told and "fleetrun: stopped by Ctrl-C" in run.told


def test_the_second_ctrl_c_ends_at_once(fleetruns: Launchers, tmp_path: Path) -> None:
    run = start_asking(fleetruns, tmp_path, "deaf")
    run.send(signal.SIGINT)
    wait_until(lambda: "press Ctrl-C again" in run.told)
    assert run.is_running()
    run.send(signal.SIGINT)
    assert run.wait(LEFT_SECONDS) == 130
    assert run.left_behind() == []


SAVES_WHEN_ASKED = """
import os, signal, sys
import torch
from fleetx import fleet
model = torch.nn.Linear(2, 2)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(10**9):
    optimizer.minimize(model(torch.ones(1, 2)).sum())
    if fleet.should_stop() and sys.argv[1] == "polite":
        print("saved", flush=True)
        break
    if step < 2:
        signal.raise_signal(signal.SIGINT) if step == 0 or sys.argv[1] == "deaf" else None
"""


@pytest.mark.parametrize(("manner", "code", "out"), [("polite", 0, "saved\n"), ("deaf", -signal.SIGINT, "")])
def test_without_a_launcher_the_first_ctrl_c_asks_and_the_second_interrupts(manner: str, code: int, out: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "FLEETX_VERBOSE": "0"}
    command = [sys.executable, "-W", "ignore", "-c", SAVES_WHEN_ASKED, manner]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (code, out), ended.stderr
    assert "press Ctrl-C again to end at once" in ended.stderr and ("KeyboardInterrupt" in ended.stderr) is (manner == "deaf")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(fleetruns: Launchers, tmp_path: Path, signum: signal.Signals) -> None:
    run = start_asking(fleetruns, tmp_path, "deaf")
    run.send(signal.SIGTERM)
    wait_until(lambda: "stopping (SIGTERM)" in run.told)
    run.send(signum)
    assert run.wait(LEFT_SECONDS) == 143
    assert run.left_behind() == []


def test_a_signal_that_comes_twice_in_a_moment_is_one_request(fleetruns: Launchers, tmp_path: Path) -> None:
    run = start_asking(fleetruns, tmp_path)
    for _ in range(2):  # as `timeout` does
        run.send(signal.SIGTERM)
    assert run.wait() == 143
    assert run.log(0) == run.log(1) == "saved\n"


def test_ranks_that_die_of_the_signal_that_their_launcher_got_too_are_no_failure(fleetruns: Launchers, tmp_path: Path) -> None:
    script = "import os, pathlib, time\npathlib.Path('up.' + os.environ['RANK']).touch()\ntime.sleep(600)"
    run = fleetruns.start(tmp_path, script, "--nproc_per_node", "2", "--max_restart", "1")
    wait_until(lambda: all((tmp_path / f"up.{rank}").exists() for rank in (0, 1)))
    workers = [process for process in psutil.Process(run.pid).children() if "worker.py" in " ".join(process.cmdline())]
    for worker in workers:
        worker.terminate()
    run.send(signal.SIGTERM)
    assert run.wait() == 143
    assert "restarting" not in run.told and "failed" not in run.told


def test_after_a_stop_the_first_rank_that_dies_takes_the_others_along(fleetruns: Launchers, tmp_path: Path) -> None:
    run = start_asking(fleetruns, tmp_path, "deaf")
    run.send(signal.SIGTERM)
    wait_until(lambda: "stopping (SIGTERM)" in run.told)
    workers = [process for process in psutil.Process(run.pid).children() if "worker.py" in " ".join(process.cmdline())]
    workers[0].kill()
    assert run.wait(LEFT_SECONDS) == 143
    assert "restarting" not in run.told and run.left_behind() == []


def test_sigquit_writes_all_stacks_and_the_run_goes_on(fleetruns: Launchers, tmp_path: Path) -> None:
    run = start_asking(fleetruns, tmp_path)
    run.send(signal.SIGQUIT)
    wait_until(lambda: all("most recent call first" in run.log(rank) for rank in (0, 1)))
    wait_until(lambda: "the stacks of all ranks are in their logs" in run.told)
    run.send(signal.SIGTERM)
    assert run.wait() == 143
    assert run.log(1).endswith("saved\n")


def test_a_worker_whose_launcher_is_gone_already_does_not_begin(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('began')")
    variables = {**os.environ, "FLEETX_LAUNCHER_PID": "1", "FLEETX_WORKER_LOG": str(tmp_path / "log")}
    worker = [sys.executable, str(SOURCE / "fleetx" / "launch" / "worker.py"), "script", str(script)]
    ended = subprocess.run(worker, env=variables, timeout=20)
    assert ended.returncode == 1 and not (tmp_path / "log").exists()


def main(times: int) -> None:
    with launchers() as started:
        for signum in EXIT_CODES:
            for moment in MOMENTS:
                for _ in range(times):
                    with tempfile.TemporaryDirectory() as folder:
                        strike(started, Path(folder), moment, signum, delay_seconds=random.uniform(0.0, 0.4))
                print(f"{signum.name:8} {moment:8} {times} of {times}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
