"""fleetrun with real processes: what it starts, writes, shows, and how it ends."""

from __future__ import annotations

import functools
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import fleetx
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
PICKLES_LATE = """
import atexit, pickle, threading
class Net: pass
def save(when):
    pickle.dumps(Net())
    print(when)
def save_when_done():
    threading.main_thread().join()
    save("by a thread")
if __name__ == "__main__":
    atexit.register(save, "at exit")
    threading.Thread(target=save_when_done).start()
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the ranks are on the CPU, also on a machine with GPUs
    return tmp_path


def fleetrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS)


def box(told: str) -> list[str]:
    """What is said inside a frame of at most 15 lines and 100 columns."""
    top, *lines, bottom = told.splitlines()
    assert top == bottom == f"+{'-' * (len(top) - 2)}+" and len(top) <= 100 and len(lines) <= 13
    return [line[2:-2].rstrip() for line in lines]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
    assert ended.stdout.splitlines()[0].startswith(
        "Local start of 2 processes. Rank N writes to log/workerlog.N (those of an earlier run are in log/run-1 now);"
    )
    assert "Distributed Envs" not in ended.stdout


def test_the_start_is_one_line_2_shows_the_tables_and_0_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "train.py", "print('out of the script')")
    ended = fleetrun("--nproc_per_node", "1", "train.py")
    assert (ended.returncode, len(ended.stdout.splitlines())) == (0, 2)
    monkeypatch.setenv("FLEETX_VERBOSE", "2")
    ended = fleetrun("--nproc_per_node", "1", "train.py")
    for told in ("Configuration Arguments", "nproc_per_node: 1", "Distributed Envs", "MASTER_PORT", "log/workerlog.N"):
        assert told in ended.stdout
    monkeypatch.setenv("FLEETX_VERBOSE", "0")
    ended = fleetrun("--nproc_per_node", "1", "train.py")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "out of the script\n", "")
    monkeypatch.setenv("FLEETX_VERBOSE", "no")
    ended = fleetrun("--nproc_per_node", "1", "train.py")
    assert ended.returncode == 2 and ended.stderr.startswith("fleetrun: FLEETX_VERBOSE is 'no'; it must be 0")


def test_an_exception_on_rank_1_is_told_in_a_few_lines_although_rank_0_fails_too(folder: Path) -> None:
    write(folder / "train.py", RAISE_ON_RANK_1)
    ended = fleetrun("--nproc_per_node=2", "--log_dir", "logs/here", "train.py")
    assert ended.returncode == 1
    assert box(ended.stderr) == [
        "fleetrun: rank 1 (node 0, cpu) failed first: exit code 1",
        "ValueError: no such sample",
        "at train.py:7, in train",
        "then ended: rank 0",
        "log: logs/here/workerlog.1",
    ]
    assert "worker.py" not in (folder / "logs/here/workerlog.1").read_text()
    shown = [line for line in ended.stdout.splitlines() if line.startswith("n0·r1| ")]
    assert "Traceback (most recent call last):" in shown[0] and "ValueError: no such sample" in shown[-1]


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
    told = box(ended.stderr)
    assert told[0] == "fleetrun: rank 1 (node 0, cpu) failed first: killed by SIGKILL (exit code 137)"
    assert told[-1] == "log: log/workerlog.1"


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
        (["--nproc-per-node", "0", "train.py"], 2, "a whole number of at least 1, or auto, gpu or cpu, is needed, got '0'"),
        (["--server_num", "2", "--worker_num", "2", "train.py"], 2, "fleetrun is collective only"),
        (["--nnodes", "2", "train.py"], 2, "write --master HOST with node 0's address, or --ips A,B with all"),
        (["--ips", "192.0.2.7,192.0.2.8", "train.py"], 2, "is this machine, whose addresses are 127.0.0.1"),
        (["--env", "RANK=1", "train.py"], 2, "fleetrun gives each rank its own"),
        (["--gpus", "0,,1", "train.py"], 2, "such as 0,1; got '0,,1'"),
        (["--log_dir", "train.py", "train.py"], 2, "--log_dir train.py cannot be written"),
        (["--nproc_per_node", "2"], 2, "no script was given"),
        (["data/missing.py"], 66, "there is no script 'data/missing.py'; the working folder is"),
        (["."], 66, "'.' is a folder; name the script in it"),
        (["-m", "no_such_module"], 66, "there is no module 'no_such_module'"),
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
    assert not (folder / "log").exists()


def test_a_syntax_error_is_one_message_and_nothing_is_started(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "train.py", "import sys\nfor x in sys.argv\n    print(x)\n")
    assert main(["train.py"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "fleetrun: train.py:2: SyntaxError: expected ':'\n    for x in sys.argv\n                     ^\n"
    assert captured.out == "" and not (folder / "log").exists()


def test_a_dry_run_starts_nothing_and_warns_of_too_many_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "train.py", "raise SystemExit('was run')")
    flags = ["--dry-run", "--nproc_per_node", "999", "--env", "API_KEY=abc", "--max_restarts", "2"]
    assert main([*flags, "train.py", "a b"]) == 0
    captured = capsys.readouterr()
    for told in ("max_restart: 2", "env: API_KEY=***", "log/workerlog.998", "worker.py script train.py 'a b'\n", "MASTER_PORT"):
        assert told in captured.out
    assert captured.err.startswith("fleetrun: warning: 999 ranks on ") and captured.err.count("\n") == 1
    assert not (folder / "log").exists()


def test_tee_all_shows_every_rank_by_node_and_rank_and_env_reaches_them(folder: Path) -> None:
    write(folder / "train.py", "import os\nprint('mode', os.environ['MODE'], os.environ['RANK'], '\\x1b[2J')")
    ended = fleetrun("--nproc_per_node", "2", "--tee", "all", "--env", "MODE=a=b", "train.py")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(line for line in ended.stdout.splitlines() if "mode a=b" in line) == [
        r"n0·r0| mode a=b 0 \x1b[2J",
        r"n0·r1| mode a=b 1 \x1b[2J",
    ]


def test_two_nodes_share_a_log_folder_and_number_their_ranks_node_by_node(folder: Path) -> None:
    write(
        folder / "train.py", "import os, warnings\nprint('rank', os.environ['RANK'])\nwarnings.warn('from ' + os.environ['RANK'])"
    )
    (folder / "log").mkdir()
    write(folder / "log" / "workerlog.7", "from an earlier run")
    flags = ["--ips", "127.0.0.1,127.0.0.2", "--start_port", str(free_port()), "--nproc_per_node", "2", "train.py"]
    start = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with start([*COMMAND, "--host", "127.0.0.1", *flags]) as first, start([*COMMAND, "--host", "127.0.0.2", *flags]) as second:
        (out0, err0), (out1, err1) = (node.communicate(timeout=LIMIT_SECONDS) for node in (first, second))
    assert (first.returncode, second.returncode) == (0, 0), err0 + err1
    logs = {path.name: path.read_text().splitlines()[0] for path in (folder / "log").glob("workerlog.*")}
    assert logs == {f"workerlog.{rank}": f"rank {rank}" for rank in range(4)}
    assert (folder / "log" / "run-1" / "workerlog.7").read_text() == "from an earlier run"
    assert "\nrank 0\n" in out0 and "n0·r1| " in out0 and "·r2| " not in out0
    assert "n1·r2| " in out1 and "UserWarning: from 3\n" in out1 and "\nn1·r2| rank 2\n" not in out1
    assert "Start of ranks 2-3 on node 1 of 2." in out1


def test_classes_of_the_script_can_be_pickled_after_its_last_line(folder: Path) -> None:
    write(folder / "train.py", PICKLES_LATE)
    for how in (["train.py"], ["-m", "train"]):
        ended = fleetrun("--nproc_per_node", "1", *how)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert (folder / "log" / "workerlog.0").read_text() == "by a thread\nat exit\n"


def test_libraries_have_no_say_after_the_end_of_a_script(folder: Path) -> None:
    """Some report at Python's end what is still alive. Here the process would be aborted there."""
    script = """
import ctypes, os
class Last:
    def __del__(self): print("the script's own objects end as usual")
last = Last()
if "RANK" in os.environ: ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)
raise SystemExit(int(os.environ.get("CODE", "0")))
"""
    write(folder / "train.py", script)
    ended = fleetrun("--nproc_per_node", "1", "train.py")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (folder / "log" / "workerlog.0").read_text() == "the script's own objects end as usual\n"
    assert fleetrun("--nproc_per_node", "1", "--env", "CODE=7", "train.py").returncode == 7


FAIL_TOGETHER = """
import os, pathlib, time, torch
from fleetx import fleet
pathlib.Path("ready." + os.environ["RANK"]).touch()
while len(list(pathlib.Path().glob("ready.*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""
"""Ranks fail at the same time, however long each took to start."""
FAIL_IN_TORCH = (
    FAIL_TOGETHER
    + """
def train():
    torch.nn.Linear(4, 2)(torch.ones(3, 5))
train()
"""
)


def test_an_error_that_all_ranks_share_is_shown_once_without_lines_of_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "train.py", FAIL_IN_TORCH)
    ended = fleetrun("--nproc_per_node", "3", "train.py")
    assert ended.stdout.count("Traceback (most recent call last):") == 1
    assert "line 9, in train\n" in ended.stdout and "_call_impl" not in ended.stdout
    assert "in forward\n" in ended.stdout, "where it was raised"
    assert "lines of libraries are left out; FLEETX_VERBOSE=2 shows all)" in ended.stdout
    assert "shapes cannot be multiplied" in "".join(path.read_text() for path in (folder / "log").iterdir())
    monkeypatch.setenv("FLEETX_VERBOSE", "2")
    assert "in _call_impl\n" in fleetrun("--nproc_per_node", "1", "train.py").stdout


MISSPELT = "DistributedStrategy has no setting `gradient_marge`. Did you mean `gradient_merge`?"
FAIL_ON_SETTINGS = (
    FAIL_TOGETHER
    + """
def make():
    return fleet.DistributedStrategy(gradient_marge=True)
make()
"""
)


def test_an_error_of_settings_shows_the_line_of_the_script_alone(folder: Path) -> None:
    write(folder / "train.py", FAIL_ON_SETTINGS)
    ended = fleetrun("--nproc_per_node", "2", "train.py")
    assert ended.stdout.count("Traceback (most recent call last):") == 1
    # Rank 0's, unless it was ended before it could show it: then rank 1's, with a prefix.
    shown = ended.stdout[ended.stdout.index("Traceback") :].replace("n0·r1| ", "").splitlines()
    assert [line.strip(" ^") for line in shown if line.strip(" ^")] == [
        "Traceback (most recent call last):",
        f'File "{folder / "train.py"}", line 9, in make',
        "return fleet.DistributedStrategy(gradient_marge=True)",
        f"fleetx.strategy.UnknownSettingError: {MISSPELT}",
    ]


def test_all_conflicts_are_in_the_box(folder: Path) -> None:
    script = "import torch\nfrom fleetx import fleet\nm = torch.nn.Linear(4, 2)\no = torch.optim.SGD(m.parameters(), 0.1, 0.9)\n"
    asked = "fleet.DistributedStrategy(dgc=True, lars=True, clip_norm=True, powersgd=True)"
    write(folder / "train.py", f"{script}fleet.distribute(m, o, {asked})\n")
    told = " ".join(box(fleetrun("--nproc_per_node", "1", "train.py").stderr))
    for pair in (
        "dgc and powersgd both claim `reduce`",
        "clip_norm and dgc both claim `clip`",
        "dgc and lars both claim `momentum`",
    ):
        assert pair in told


OUT_OF_MEMORY = """
import torch
from fleetx import fleet
fleet.init()
model = torch.nn.Linear(256, 256)
model, optimizer = fleet.distribute(model, torch.optim.Adam(model.parameters()))
optimizer.minimize(model(torch.ones(4, 256)).sum())
rows = 1 << 42 if fleet.worker_index() == 1 else 4
optimizer.minimize(model(torch.ones(rows, 256)).sum())
"""


def test_a_rank_without_enough_memory_ends_with_what_would_fit_in_its_numbers(folder: Path) -> None:
    (folder / "train.py").write_text(OUT_OF_MEMORY)
    ended = fleetrun("--nproc_per_node", "2", "train.py")
    assert ended.returncode == 1
    box = " ".join(line.strip("| ") for line in ended.stderr[ended.stderr.index("+---") :].splitlines())
    assert "rank 1" in box and "DefaultCPUAllocator" in box
    assert "weights take 257 KiB, gradients 257 KiB, the optimizer's state 514" in box
    assert "strategy.amp = True" in box and "fleet.find_batch(" in box
    assert "fleetx plan --estimate" in (folder / "log" / "workerlog.1").read_text()


def test_version_is_one_line(folder: Path) -> None:
    ended = fleetrun("--version")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"fleetx {fleetx.__version__}\n", "")


def test_what_a_script_leaves_in_open_files_is_written_also_from_a_cycle_and_after_its_own_exit_handlers(folder: Path) -> None:
    script = """
import atexit
class Notes:
    def __init__(self, name):
        self.file, self.me = open(name, "w"), self
notes = Notes("cycle")
notes.file.write("from a cycle")
plain = open("plain", "w")
plain.write("from the script, ")
atexit.register(plain.write, "and its exit handler")
"""
    write(folder / "train.py", script)
    assert fleetrun("--nproc_per_node", "1", "train.py").returncode == 0
    assert (folder / "cycle").read_text() == "from a cycle"
    assert (folder / "plain").read_text() == "from the script, and its exit handler"


def test_input_is_for_rank_0_and_an_error_keeps_its_further_lines(folder: Path) -> None:
    write(folder / "train.py", "import sys\ntext = sys.stdin.read()\nprint('read', [text])\nif text: raise OSError('no\\nway')")
    command = [*COMMAND, "--nproc_per_node", "2", "train.py"]
    ended = subprocess.run(command, input="yes", capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert (folder / "log" / "workerlog.0").read_text().startswith("read ['yes']\n")
    assert (folder / "log" / "workerlog.1").read_text() in ("", "read ['']\n")
    assert ended.returncode == 1
    assert box(ended.stderr)[1:3] == ["OSError: no", "way"]


def test_a_working_folder_that_was_removed_is_told_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(folder / "train.py", "")
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    (folder / "gone").rmdir()
    try:
        assert main([script]) == 66
    finally:
        os.chdir(folder)
    assert capsys.readouterr().err == (
        "fleetrun: the working folder is gone: No such file or directory. Change to one that exists.\n"
    )


def test_a_console_that_is_gone_ends_no_run(folder: Path) -> None:
    write(folder / "train.py", "import os\nfor line in range(20000): print('line', line)\nopen(os.environ['RANK'], 'w').close()")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([*COMMAND, "train.py"], stdout=writer, stderr=subprocess.PIPE, timeout=LIMIT_SECONDS)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert (folder / "0").exists() and (folder / "1").exists()


def catches(pid: int, signum: signal.Signals) -> bool:
    status = (Path("/proc") / str(pid) / "status").read_text()
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> (signum - 1) & 1)


@pytest.mark.parametrize(
    ("signum", "code", "told"),
    [
        (signal.SIGTERM, 143, "fleetrun: stopped by SIGTERM; no rank is running\n"),
        (signal.SIGHUP, 129, "fleetrun: stopped by SIGHUP; no rank is running\n"),
        (signal.SIGUSR1, 143, "fleetrun: stopped by SIGUSR1; no rank is running\n"),
        (signal.SIGINT, 130, "fleetrun: stopped by Ctrl-C; no rank is running\n"),
    ],
)
def test_a_signal_while_torch_is_imported_is_one_line_and_its_exit_code(
    folder: Path, signum: signal.Signals, code: int, told: str
) -> None:
    write(folder / "train.py", "")
    with subprocess.Popen([*COMMAND, "train.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        wait_until(lambda: catches(launcher.pid, signal.SIGUSR1))  # the last one for which a handler is set
        launcher.send_signal(signum)
        shown, said = launcher.communicate(timeout=LIMIT_SECONDS)
    assert (launcher.returncode, shown, said) == (code, "", told)
