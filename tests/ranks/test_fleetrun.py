"""fleetrun with real processes: what it starts, writes, shows, and how it ends."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fleetx.launch.fleetrun import main

SOURCE = Path(__file__).parents[2] / "src"
LIMIT_SECONDS = 60.0
COMMAND = [sys.executable, "-m", "fleetx.launch"]

ALL_REDUCE = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("out of rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item())
print("err of rank", dist.get_rank(), file=sys.stderr)
print("env", *(os.environ[name] for name in ("LOCAL_RANK", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "MASTER_ADDR")))
dist.destroy_process_group()
"""
RAISE_ON_RANK_1 = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
def train():
    if dist.get_rank() == 1:
        raise ValueError("no such sample")
    dist.barrier()
train()
"""
SLEEP = """
import os, pathlib, sys, time
path = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
path.with_suffix(".part").write_text(str(os.getpid()))
path.with_suffix(".part").rename(path)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def fleetrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.05)


def test_two_ranks_reduce_and_each_log_holds_its_stdout_and_stderr_in_order(folder: Path) -> None:
    write(folder / "train.py", ALL_REDUCE)
    (folder / "log").mkdir()
    for rank in (0, 5):
        write(folder / "log" / f"workerlog.{rank}", "from an earlier run\n")
    ended = fleetrun("--nproc-per-node", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        lines = (folder / "log" / f"workerlog.{rank}").read_text().splitlines()
        assert lines == [f"out of rank {rank} of 2 sum 3.0", f"err of rank {rank}", f"env {rank} {rank} 2 127.0.0.1"]
    assert not (folder / "log" / "workerlog.5").exists()
    assert "out of rank 0" in ended.stdout and "err of rank 0" in ended.stdout
    assert "of rank 1" not in ended.stdout + ended.stderr
    assert ended.stderr == ""
    for told in ("Configuration Arguments", "nproc_per_node: 2", "Distributed Envs", "MASTER_PORT", "log/workerlog.0"):
        assert told in ended.stdout


def test_an_exception_on_rank_1_is_told_in_a_few_lines_although_rank_0_fails_too(folder: Path) -> None:
    write(folder / "train.py", RAISE_ON_RANK_1)
    ended = fleetrun("--nproc_per_node=2", "--log_dir", "logs/here", "train.py")
    told = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert len(told) <= 15
    assert told[0] == "fleetrun: rank 1 failed first: exit code 1"
    assert told[1] == "  ValueError: no such sample  (train.py:7, in train)"
    assert told[-1] == "  log: logs/here/workerlog.1"
    assert "worker.py" not in (folder / "logs/here/workerlog.1").read_text()


def test_the_script_gets_its_arguments_its_folder_and_its_exit_code_through(folder: Path) -> None:
    (folder / "sub").mkdir()
    write(folder / "sub" / "beside.py", "NAME = 'imported from beside'")
    write(folder / "sub" / "train.py", "import sys, beside\nprint(sys.argv[1:], beside.NAME, __name__)\nsys.exit(7)")
    ended = fleetrun("--nproc_per_node", "1", "sub/train.py", "--gpus", "a b", "$$", "${local_rank}")
    assert ended.returncode == 7
    assert "['--gpus', 'a b', '$$', '${local_rank}'] imported from beside __main__\n" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_module_runs_and_a_terminal_is_offered_to_rank_0_only(folder: Path) -> None:
    (folder / "pack").mkdir()
    write(folder / "pack" / "__init__.py", "")
    write(folder / "pack" / "job.py", "import os, sys\nprint(__package__, sys.argv[1:], os.environ.get('FLEETX_TTY'))")
    command = [*COMMAND, "--nproc_per_node", "2", "-m", "pack.job", "x"]
    reader, writer = pty.openpty()
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=LIMIT_SECONDS)
        assert ended.returncode == 0, ended.stderr
        assert (folder / "log" / "workerlog.0").read_text() == f"pack ['x'] {os.ttyname(writer)}\n"
        assert (folder / "log" / "workerlog.1").read_text() == "pack ['x'] None\n"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_killed_worker_gives_137_and_the_name_of_the_signal(folder: Path) -> None:
    write(folder / "train.py", "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)")
    ended = fleetrun("--nproc_per_node", "2", "train.py")
    assert ended.returncode == 137
    assert ended.stderr.startswith("fleetrun: rank 1 failed first: killed by SIGKILL")
    assert len(ended.stderr.splitlines()) <= 15


def test_ctrl_c_gives_130_one_line_and_leaves_no_worker(folder: Path) -> None:
    pid_files = [folder / "0", folder / "1"]
    write(folder / "train.py", SLEEP)
    command = [*COMMAND, "--nproc_per_node", "2", "train.py", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as launcher:
        wait_until(lambda: all(path.exists() for path in pid_files))
        os.killpg(launcher.pid, signal.SIGINT)
        console, told = launcher.communicate(timeout=LIMIT_SECONDS)
    assert launcher.returncode == 130
    assert told == "fleetrun: stopped by Ctrl-C; rank 0 was at train.py:6, in <module>\n"
    assert "Traceback" not in console
    wait_until(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pid_files))


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--nproc_per_nod", "2", "train.py"], 2, "unknown flag --nproc_per_nod. Did you mean `--nproc_per_node`?"),
        (["--nproc-per-node", "0", "train.py"], 2, "a whole number of at least 1 is needed, got '0'"),
        (["--nproc_per_node", "two", "train.py"], 2, "got 'two'"),
        (["--gpus", "0,,1", "train.py"], 2, "such as 0,1; got '0,,1'"),
        (["--log_dir", "train.py", "train.py"], 2, "--log_dir train.py cannot be written"),
        (["--nproc_per_node", "2"], 2, "no script was given"),
        (["data/missing.py"], 66, "there is no script 'data/missing.py'; the working folder is"),
    ],
)
def test_misuse_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    write(folder / "train.py", "")
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert told in captured.err
    assert len(captured.err.splitlines()) == 1 and captured.out == ""
