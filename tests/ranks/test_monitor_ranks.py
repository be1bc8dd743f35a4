"""fleet.Monitor on several real ranks, under fleetrun, and on a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetx import fleet
from fleetx.monitor import ranks
from tests.helpers.harness import raised, run_ranks
from tests.helpers.launchers import Launchers, launchers, wait_until
from tests.helpers.models import batch
from tests.helpers.monitor_runs import environment, pair, records, summary, train

LIMIT_SECONDS = 60.0

SCRIPT = """
import sys, time
import torch
from fleetx import fleet

fleet.init()
model = torch.nn.Linear(8, 4)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
updates = int(sys.argv[1])
with fleet.Monitor("run", total_steps=updates, tensorboard=False) as watch:
    for step in range(updates):
        report = optimizer.minimize(model(torch.full((4, 8), 1.0 + fleet.worker_index())).square().mean())
        watch.log(report, samples=4)
        if step == updates // 2:
            print("half of it is done", flush=True)
            open("half", "w").close()
        time.sleep(float(sys.argv[2]))
        if fleet.should_stop():
            break
"""


@pytest.fixture(scope="module")
def fleetruns() -> Any:
    with launchers() as started:
        yield started


def test_worker_0_writes_and_names_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    losses = run_ranks(_train_with_a_slow_rank, 3, str(tmp_path))
    lines, ended = records(tmp_path), summary(tmp_path)
    assert [line["loss"] for line in lines] == losses[0]  # worker 0's own
    assert all(line["samples"] == 24 for line in lines)
    assert environment(tmp_path)["starts"][0]["ranks"] == 3 and environment(tmp_path)["starts"][0]["backend"] == "gloo"
    waits = {int(rank): one["communication"] for rank, one in ended["ranks"].items()}
    assert set(waits) == {0, 1, 2} and min(waits, key=lambda rank: waits[rank]) == 1
    assert min(waits[0], waits[2]) - waits[1] > 0.5 * 30 * 0.02


def _train_with_a_slow_rank(rank: int, folder: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "LAST_SECONDS", LIMIT_SECONDS)  # worker 0 goes on as soon as it has all sums
        return train(folder, 30, slow_rank=1, slow_s=0.02)


def test_ranks_find_each_others_sums_whatever_each_has_run_before(tmp_path: Path) -> None:
    run_ranks(_train_three, 1, str(tmp_path / "before"))
    run_ranks(_train_three, 2, str(tmp_path / "run"))  # rank 0 has had one monitor more in its process than rank 1
    assert set(summary(tmp_path / "run")["ranks"]) == {"0", "1"}


def _train_three(rank: int, folder: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "LAST_SECONDS", LIMIT_SECONDS)
        return train(folder, 3)


def test_bytes_are_those_of_the_reports_against_a_dense_all_reduce(tmp_path: Path) -> None:
    sent = run_ranks(_train_local, 2, str(tmp_path))
    lines = records(tmp_path)
    numbers = sum(p.numel() for p in _model().parameters())
    assert [line["bytes_sent"] for line in lines] == sent[0]
    assert all(line["bytes_dense"] == 4 * numbers for line in lines)  # 2 (N - 1) / N of float32 is 4 bytes for two ranks
    assert {line["period"] for line in lines} == {4}
    assert sum(line["bytes_sent"] for line in lines) < 0.6 * sum(line["bytes_dense"] for line in lines)


def _model() -> torch.nn.Module:
    from tests.helpers.models import mlp

    return mlp()


def _train_local(rank: int, folder: str) -> list[int]:
    model, optimizer = pair(localsgd=True, localsgd_configs={"k_steps": 4, "begin_step": 1})
    sent = []
    with fleet.Monitor(folder, show=False, tensorboard=False) as watch:
        for index in range(16):
            x, y = batch(2 * index + rank)
            report = optimizer.minimize(torch.nn.functional.cross_entropy(model(x), y))
            watch.log(report)
            sent.append(report.bytes_sent)
    return sent


def test_a_monitor_on_worker_0_alone_holds_no_rank_up(tmp_path: Path) -> None:
    run_ranks(_train_with_one_monitor, 2, str(tmp_path))
    assert len(records(tmp_path)) == 5 and summary(tmp_path)["ranks"] is None


def _train_with_one_monitor(rank: int, folder: str) -> None:
    model, optimizer = pair()
    watch = fleet.Monitor(folder, show=False, tensorboard=False) if rank == 0 else None
    for index in range(5):
        x, y = batch(2 * index + rank)
        report = optimizer.minimize(torch.nn.functional.cross_entropy(model(x), y))
        if watch is not None:
            watch.log(report)
    if watch is not None:
        watch.close()


def test_a_process_group_that_is_closed_first_is_no_failure(tmp_path: Path) -> None:
    run_ranks(_close_the_group_first, 2, str(tmp_path))
    assert summary(tmp_path)["state"] == "finished" and len(records(tmp_path)) == 3


def _close_the_group_first(rank: int, folder: str) -> None:
    model, optimizer = pair()
    with fleet.Monitor(folder, show=False, tensorboard=False) as watch:
        for index in range(3):
            watch.log(optimizer.minimize(model(batch(2 * index + rank)[0]).square().mean()))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def test_in_ddp_no_rank_is_said_to_wait_since_that_is_not_known(tmp_path: Path) -> None:
    run_ranks(_train_in_ddp, 2, str(tmp_path))
    assert summary(tmp_path)["ranks"] is None and len(records(tmp_path)) == 5
    made = environment(tmp_path)["starts"][0]["pairs"][0]
    assert (made["model"], made["wrapped_in"]) == ("Sequential", "DistributedDataParallel")


def _train_in_ddp(rank: int, folder: str) -> None:
    wrapped = torch.nn.parallel.DistributedDataParallel(_model())
    model, optimizer = fleet.distribute(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    with fleet.Monitor(folder, show=False, tensorboard=False) as watch:
        for index in range(5):
            watch.log(optimizer.minimize(model(batch(2 * index + rank)[0]).square().mean()))


def test_a_folder_that_cannot_be_written_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = run_ranks(_open_a_bad_folder, 2, str(tmp_path / "file" / "run"))
    assert told[0].startswith("ConfigError: the run folder") and "cannot be written" in told[0]
    assert told[1].startswith("DataError: worker 0 has stopped: the run folder")


def _open_a_bad_folder(rank: int, folder: str) -> str:
    from fleetx.dist import world

    def go() -> None:
        model, optimizer = pair()
        with fleet.Monitor(folder, show=False):
            optimizer.minimize(model(batch(rank)[0]).square().mean())

    told = raised(go)
    if rank == 0:
        world.close_world()  # as the end of the process does
    return told


def test_worker_logs_of_a_job_end_up_in_the_folder_of_the_run(fleetruns: Launchers, tmp_path: Path) -> None:
    launcher = fleetruns.start(tmp_path, SCRIPT.replace("sys.argv[1]", "'4'").replace("sys.argv[2]", "'0'"), "--nproc_per_node=2")
    assert launcher.wait() == 0, launcher.told
    assert "half of it is done" in (tmp_path / "run" / "workerlog.1").read_text()
    last = launcher.console.splitlines()[-1]
    assert last.startswith("finished after") and "4 steps" in last and last.endswith("run")


def test_the_log_of_a_rank_that_failed_is_kept_with_its_traceback(fleetruns: Launchers, tmp_path: Path) -> None:
    script = SCRIPT.replace("sys.argv[1]", "'4'").replace("sys.argv[2]", "'0'").replace("break", "raise ValueError('bad day')")
    script = script.replace("if fleet.should_stop():", "if step == 2 and fleet.is_first_worker():")
    launcher = fleetruns.start(tmp_path, script, "--nproc_per_node=2")
    assert launcher.wait() == 1
    assert "ValueError: bad day" in (tmp_path / "run" / "workerlog.0").read_text()
    assert summary(tmp_path / "run")["state"] == "failed" and summary(tmp_path / "run")["error"] == "ValueError: bad day"


def test_a_job_that_is_asked_to_stop_says_so_in_its_summary(fleetruns: Launchers, tmp_path: Path) -> None:
    script = SCRIPT.replace("sys.argv[1]", "'4000'").replace("sys.argv[2]", "'0.01'").replace("updates // 2", "5")
    launcher = fleetruns.start(tmp_path, script, "--nproc_per_node=2")
    wait_until((tmp_path / "half").exists)
    launcher.send(signal.SIGTERM)
    launcher.wait()
    assert summary(tmp_path / "run")["state"] == "stopped"
    assert summary(tmp_path / "run")["steps"] == len(records(tmp_path / "run")) < 4000


def shown_on_a_terminal(command: list[str], folder: Path, **variables: str) -> str:
    """All that a command writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    source = str(Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": source, "TERM": "xterm", "OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    shown, until = b"", time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        elif process.poll() is not None:
            break
    assert process.wait(LIMIT_SECONDS) == 0, shown.decode(errors="replace")
    os.close(ours)
    return shown.decode(errors="replace")


def test_on_a_terminal_one_line_is_drawn_over_itself_and_prints_appear_above(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    text = shown_on_a_terminal([sys.executable, "train.py", "40", "0.02"], tmp_path)
    drawn = re.findall(r"\r\x1b\[2K[^\r\n]*?(\d+)/40", text)
    assert len(drawn) >= 2 and int(drawn[0]) < int(drawn[-1]) <= 40
    assert "half of it is done\r\n" in text
    assert "\x1b[?25h" in text[text.rindex("finished after") - 200 :]  # the cursor is back


def test_under_fleetrun_the_line_is_drawn_on_the_launchers_terminal_and_not_into_the_log(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node=2", "train.py", "40", "0.05"]
    text = shown_on_a_terminal(command, tmp_path)
    assert len(re.findall(r"(\d+)/40", text)) >= 2 and "loss" in text
    assert "\r\x1b[Khalf of it is done" in text  # in place of the drawn line, which comes again below
    log = (tmp_path / "log" / "workerlog.0").read_text()
    assert "half of it is done" in log and "/40" not in log and "\x1b[2K" not in log


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), pytest.param("TERM", "dumb", marks=pytest.mark.campaign)])
def test_colours_and_drawing_can_be_switched_off(tmp_path: Path, name: str, value: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    text = shown_on_a_terminal([sys.executable, "train.py", "10", "0.02"], tmp_path, **{name: value})
    assert "finished after" in text
    assert not re.search(r"\x1b\[[0-9;]*[34][0-9](;[0-9]+)*m", text)
    if name == "TERM":
        assert "\x1b[2K" not in text
