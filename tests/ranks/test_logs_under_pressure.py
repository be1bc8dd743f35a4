"""Logs of ranks on a full disk, in a folder that is deleted, too long, or with links in their place: the run goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetx.launch import worker
from tests.helpers.launchers import Launchers, launchers, wait_until

WORKER = Path(worker.__file__)
PRELUDE = """
import os, pathlib, sys, time
rank, attempt = os.environ["RANK"], int(os.environ["FLEETX_ATTEMPT"])
def say_until(name, text):
    until = time.monotonic() + 60
    while not pathlib.Path(name).exists() and time.monotonic() < until:
        print(text, flush=True)
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def fleetruns() -> Iterator[Launchers]:
    with launchers() as started:
        yield started


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)], capture_output=True)
    if made.returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


# --- a full disk ----------------------------------------------------------------------------------------------------------

FULL = (
    PRELUDE
    + """
import logging
print("before")
with open("disk/ballast", "wb", buffering=0) as file:  # all the room there is
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
for number in range(2000):
    print("dropped", number)
sys.stderr.write("dropped too\\n")
logging.warning("dropped as well")
os.unlink("disk/ballast")
print("after")
"""
)


def test_on_a_full_disk_lines_are_dropped_and_counted_and_the_run_goes_on(
    fleetruns: Launchers, tmp_path: Path, small_disk: Path
) -> None:
    run = fleetruns.start(tmp_path, FULL, "--nproc_per_node=1", "--log_dir=disk/log", "--tee=none")
    assert run.wait() == 0, run.told
    log = (small_disk / "log" / "workerlog.0").read_text()
    assert log.startswith("before\n") and log.endswith("after\n")
    assert "bytes of output were lost: No space left on device]\nafter\n" in log
    assert "dropped 1999" not in log


def test_a_restart_begins_on_a_full_disk(fleetruns: Launchers, tmp_path: Path, small_disk: Path) -> None:
    script = (
        PRELUDE
        + """
with open("disk/ballast", "ab", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
print("x" * 10_000)
if attempt < 2:
    os._exit(3)
pathlib.Path("ended").touch()
"""
    )
    run = fleetruns.start(tmp_path, script, "--nproc_per_node=1", "--max_restart=2", "--log_dir=disk/log")
    assert run.wait() == 0, run.told
    assert (tmp_path / "ended").exists() and "restarting (2 of 2)" in run.told


# --- a folder that is deleted -----------------------------------------------------------------------------------------------

DELETED = (
    PRELUDE
    + """
print("first")
if attempt == 0:
    pathlib.Path("ready." + rank).touch()
    say_until("go", "still here")
    sys.exit(3)
print("second")
"""
)


def test_a_log_folder_that_is_deleted_is_made_again_at_once_and_for_a_restart(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, DELETED, "--nproc_per_node=2", "--max_restart=1", "--tee=all")
    wait_until(lambda: all((tmp_path / f"ready.{rank}").exists() for rank in range(2)))
    shutil.rmtree(tmp_path / "log")
    wait_until(lambda: all((tmp_path / "log" / f"workerlog.{rank}").exists() for rank in range(2)))
    wait_until(lambda: "still here" in run.log(0) and "still here" in run.log(1))
    shutil.rmtree(tmp_path / "log")
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.told
    for rank in range(2):
        assert "--- attempt 2 of 2, " in run.log(rank) and run.log(rank).endswith("first\nsecond\n")
    assert run.console.count("first\n") == 4 and run.console.count("second\n") == 2, "shown from the new files too"


def test_a_run_ends_well_although_its_log_folder_was_deleted_and_a_file_lies_there(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, DELETED.replace("sys.exit(3)", "sys.exit(0)"), "--nproc_per_node=1")
    wait_until((tmp_path / "ready.0").exists)
    shutil.rmtree(tmp_path / "log")
    (tmp_path / "log").write_text("in the way")
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.told


# --- a log that is too long ---------------------------------------------------------------------------------------------------


def run_worker(folder: Path, script: str, *, mb: int = 0) -> subprocess.CompletedProcess[str]:
    """One worker without a launcher."""
    (folder / "train.py").write_text(script)
    env = {**os.environ, "FLEETX_WORKER_LOG": str(folder / "log" / "workerlog.0"), "FLEETX_WORKER_LOG_MB": str(mb)}
    env |= {"RANK": "0", "FLEETX_ATTEMPT": "0", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(WORKER), "script", "train.py"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


LONG = """
import time
real, now = time.monotonic, [time.monotonic()]
time.monotonic = lambda: now[0]
for number in range(30):
    print(number, "x" * 100_000)
    now[0] += 2.0  # so that each line is preceded by a look at the file
print("the end")
"""


def test_a_log_that_is_too_long_becomes_the_older_one_and_no_line_is_cut(tmp_path: Path) -> None:
    assert run_worker(tmp_path, LONG, mb=1).returncode == 0
    older, newer = ((tmp_path / "log" / name).read_text() for name in ("workerlog.0.1", "workerlog.0"))
    assert newer.endswith("the end\n") and len(newer) < 2**20 + 200_000
    numbers = [int(line.split()[0]) for line in (older + newer).splitlines()[:-1]]
    assert numbers == list(range(numbers[0], 30)) and numbers[0] > 0
    assert sorted(os.listdir(tmp_path / "log")) == ["workerlog.0", "workerlog.0.1"]


# --- streams are Python's own in all other ways -------------------------------------------------------------------------------

STREAMS = """
import contextlib, io, os, subprocess, sys
print("one", end="")
print("two", file=sys.stderr)
sys.stdout.buffer.write("\\u00e9\\n".encode())
subprocess.run(["echo", "child"])
print(sys.stdout.name, sys.stderr.name, sys.stdout.isatty(), sys.stdout is sys.__stdout__, sys.stdout.encoding)
with contextlib.redirect_stdout(io.StringIO()):
    print("elsewhere")
kept = os.dup(1)
os.dup2(os.open("own", os.O_WRONLY | os.O_CREAT), 1)
import time
real = time.monotonic
time.monotonic = lambda: real() + 100  # the next line looks at the log
os.rename("log/workerlog.0", "log/moved")
print("redirected by the script")
print("to the new log", file=sys.stderr)
os.dup2(kept, 1)
print("to the moved one")
"""


def test_what_a_script_does_with_its_streams_is_as_without_fleetrun(tmp_path: Path) -> None:
    ended = run_worker(tmp_path, STREAMS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    log = (tmp_path / "log" / "moved").read_text()
    assert log == "onetwo\né\nchild\n<stdout> <stderr> False True utf-8\nto the moved one\n"
    assert (tmp_path / "own").read_text() == "redirected by the script\n"
    assert (tmp_path / "log" / "workerlog.0").read_text() == "to the new log\n"


def test_a_pipe_that_breaks_is_still_an_error_of_the_script(tmp_path: Path) -> None:
    script = """
import os, sys
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
try:
    print("x")
except BrokenPipeError:
    print("told", file=sys.stderr)
os._exit(0)
"""
    run_worker(tmp_path, script)
    assert (tmp_path / "log" / "workerlog.0").read_text() == "told\n"


# --- links in the place of a log ------------------------------------------------------------------------------------------------


def test_a_link_in_the_place_of_a_log_is_removed_at_the_start_and_its_victim_stays(fleetruns: Launchers, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "log" / "workerlog.0").symlink_to(tmp_path / "victim")
    run = fleetruns.start(tmp_path, "print('hello')", "--nproc_per_node=1")
    assert run.wait() == 0, run.told
    assert (tmp_path / "victim").read_text() == "precious"
    assert run.log(0) == "hello\n" and not (tmp_path / "log" / "workerlog.0").is_symlink()


def test_a_link_put_there_during_the_run_gets_nothing(fleetruns: Launchers, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    script = (
        PRELUDE
        + """
if attempt == 0:
    os.unlink("log/workerlog.0")
    os.symlink("../victim", "log/workerlog.0")
    sys.exit(3)
print("to nowhere")
"""
    )
    run = fleetruns.start(tmp_path, script, "--nproc_per_node=1", "--max_restart=1", "--log_overwrite")
    assert run.wait() == 0, run.told
    assert (tmp_path / "victim").read_text() == "precious"


def test_other_users_cannot_read_a_log(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, "print('token')", "--nproc_per_node=1")
    assert run.wait() == 0
    assert os.stat(tmp_path / "log" / "workerlog.0").st_mode & 0o007 == 0
