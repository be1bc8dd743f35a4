"""Ranks of a restart are forked from a process that has imported torch: the script cannot tell, and neither can its logs.

A module of three lines stands in for torch where the import itself is not the question."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.harness import run_ranks
from tests.helpers.launchers import USES_PROGRESS, Launcher, Launchers, launchers, wait_until
from tests.helpers.warm_runs import train

ROOT = Path(__file__).parents[2]
STAND_IN = """
import os, warnings
IMPORTED_BY, TOLD = os.getpid(), os.environ["SET_EARLY"]
print("imported")
warnings.warn("odd platform")
"""
BEGINS = (
    """import os, sys
os.environ["SET_EARLY"] = "4"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
sys.path.insert(1, os.path.abspath("stand_ins"))
"""
    + USES_PROGRESS
    + """
import pathlib, signal, time
import torch
attempt, rank = os.environ["FLEETX_ATTEMPT"], os.environ["RANK"]
def train_until(path):
    step = 0
    while not pathlib.Path(path).exists():
        step += 1
        progress.at_step(step)
        time.sleep(0.01)
def begins():
    pathlib.Path(f"began.{attempt}.{rank}").write_text(f"{os.getpid()} {int(torch.IMPORTED_BY == os.getpid())}")
"""
)
DIES = """
begins()
train_until(f"die.{attempt}")
if rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
RAISES_LATER = """
begins()
train_until("die.0")
if attempt == "0" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
print("on the way", flush=True)
if attempt == "1" and rank == "1":
    raise ValueError("no such sample")
time.sleep(600)
"""
HAS_CHILDREN = """
import subprocess
begins()
if attempt == "0":
    train_until("die.0")
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen(sleep, env={})
if os.fork() == 0:
    time.sleep(600)
pathlib.Path(f"trains.{rank}").touch()
time.sleep(600)
"""
LOOKS_AROUND = """
import atexit, ctypes, json, multiprocessing, os, random, resource, signal, sys, threading
where = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(where))
first = {
    "environ": list(os.environ.items()), "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "flags": list(sys.flags),
    "orig_argv": sys.orig_argv, "warnoptions": sys.warnoptions, "xoptions": sys._xoptions, "meta_path": len(sys.meta_path),
    "fds": {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in range(256) if os.path.lexists(f"/proc/self/fd/{fd}")},
    "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "handlers": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.valid_signals() if hasattr(s, "name")},
    "is_leader": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], "parent": os.getppid(), "death": where.value,
    "limits": [resource.getrlimit(n) for n in range(16)], "nice": os.nice(0), "cores": sorted(os.sched_getaffinity(0)),
    "thread": threading.main_thread().native_id == os.getpid(), "threads": threading.active_count(),
    "command": open("/proc/self/cmdline").read(), "name": open("/proc/self/comm").read(), "main": sorted(globals()),
    "file": globals().get("__file__"), "is_main": __name__, "torch": "torch" in sys.modules,
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.fileno()] for s in (sys.stdout, sys.stderr)],
    "oom": open("/proc/self/oom_score_adj").read(), "start": multiprocessing.get_start_method(allow_none=True),
}
first["umask"] = os.umask(0o22); os.umask(first["umask"])
private = [random.random(), bytes(multiprocessing.current_process().authkey).hex()]
"""
LOOKS_AND_DIES = (
    LOOKS_AROUND
    + BEGINS
    + """
def square(number):
    return number * number
if __name__ == "__main__":
    made = []
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            made.append(pool.map(square, [3]))
    atexit.register(lambda: pathlib.Path(f"left.{attempt}.{rank}").touch())
    seen = {"first": first, "private": private, "after": list(os.environ.items()), "told": torch.TOLD, "made": made}
    pathlib.Path(f"part.{attempt}.{rank}").write_text(json.dumps(seen))
    os.rename(f"part.{attempt}.{rank}", f"seen.{attempt}.{rank}")
    begins()
    train_until(f"die.{attempt}")
    if attempt == "0" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == "0":
        time.sleep(600)
"""
)
OF_AN_ATTEMPT = {"FLEETX_ATTEMPT", "FLEETX_NOTE_KEY", "FLEETX_PROGRESS_FILE", "FLEETX_FAILURE_FILE", "TORCHELASTIC_RESTART_COUNT"}
OF_AN_ATTEMPT |= {"MASTER_PORT"}


@pytest.fixture(scope="module")
def fleetruns() -> Iterator[Launchers]:
    with launchers() as started:
        yield started


def start(fleetruns: Launchers, folder: Path, script: str, *flags: str) -> Launcher:
    (folder / "stand_ins").mkdir(parents=True)
    (folder / "stand_ins" / "torch.py").write_text(STAND_IN)
    return fleetruns.start(folder, script, "--nproc_per_node=2", *flags, FLEETX_VERBOSE="2")


def warm_processes(run: Launcher) -> list[int]:
    """The processes that were ready to fork, in order."""
    return [int(pid) for pid in re.findall(r"a restart would fork its ranks from process (\d+)", run.told)]


def wait_until_warm(run: Launcher, count: int = 1) -> int:
    wait_until(lambda: len(warm_processes(run)) == count)
    return warm_processes(run)[-1]


def ranks_of(run: Launcher, attempt: int) -> dict[int, tuple[int, bool]]:
    """Of each rank of the attempt its process, and whether that has imported torch itself."""
    paths = {rank: run.folder / f"began.{attempt}.{rank}" for rank in (0, 1)}
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths.values()))
    fields = {rank: path.read_text().split() for rank, path in paths.items()}
    return {rank: (int(pid), own == "1") for rank, (pid, own) in fields.items()}


def test_a_killed_rank_is_replaced_by_forked_ranks_that_end_with_the_same_bits(fleetruns: Launchers, tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import os, pathlib
from fleetx import fleet
from tests.helpers.warm_runs import die_once, train
fleet.init()
rank = fleet.worker_index()
pathlib.Path(f"end.{{rank}}").write_text(train(rank, ".", die_once))
"""
    run = fleetruns.start(
        tmp_path,
        script,
        "--nproc_per_node=2",
        "--max_restart=1",
        FLEETX_VERBOSE="2",
        FLEETX_DEVICE="cpu",
        CUDA_VISIBLE_DEVICES="",
    )
    wait_until_warm(run)
    (tmp_path / "die").touch()
    assert run.wait() == 0, run.told + run.console
    assert "the ranks are forked from the warm process" in run.told
    undisturbed = run_ranks(train, 2, str(tmp_path / "undisturbed"))
    assert [(tmp_path / f"end.{rank}").read_text() for rank in (0, 1)] == undisturbed
    assert run.left_behind() == []


@pytest.mark.parametrize("flags", [("--env=SOME=thing",), ("-m",)], ids=["script", "module"])
def test_a_forked_rank_sees_what_an_executed_one_sees(fleetruns: Launchers, tmp_path: Path, flags: tuple[str, ...]) -> None:
    script = LOOKS_AND_DIES
    if flags == ("-m",):
        (tmp_path / "train").mkdir()
        (tmp_path / "train" / "__init__.py").touch()
        (tmp_path / "train" / "py.py").write_text(script)  # `-m train.py` names the module `py` of this package
    run = start(fleetruns, tmp_path, script, "--max_restart=1", *flags)
    wait_until_warm(run)
    (tmp_path / "die.0").touch()
    assert all(own for _, own in ranks_of(run, 0).values()) and not any(own for _, own in ranks_of(run, 1).values())
    (tmp_path / "die.1").touch()
    assert run.wait() == 0, run.told
    privates = []
    for rank in (0, 1):
        executed, forked = (json.loads((tmp_path / f"seen.{attempt}.{rank}").read_text()) for attempt in (0, 1))
        assert as_compared(forked) == as_compared(executed)
        assert forked["told"] == "4" and forked["made"] == [[9]] * 3
        assert forked["first"]["death"] == signal.SIGKILL and forked["first"]["is_leader"] == [True, True]
        privates += [*executed["private"], *forked["private"]]
        assert (tmp_path / f"left.1.{rank}").exists()
        executed_log, forked_log = re.split("--- attempt .*\n", run.log(rank))
        assert sorted(set(forked_log.splitlines())) == sorted(set(executed_log.splitlines()))
    assert len(set(privates)) == len(privates)


def as_compared(seen: dict[str, Any]) -> dict[str, Any]:
    """What must be equal: all but the variables that each attempt has for itself, and whether torch was imported before."""
    environments = {
        when: [(name, value) for name, value in entries if name not in OF_AN_ATTEMPT]
        for when, entries in (("first", seen["first"]["environ"]), ("after", seen["after"]))
    }
    rest = {name: value for name, value in seen["first"].items() if name not in ("environ", "torch", "meta_path")}
    return {**rest, **environments}


def test_an_error_in_a_forked_rank_is_told_as_ever(fleetruns: Launchers, tmp_path: Path) -> None:
    run = start(fleetruns, tmp_path, BEGINS + RAISES_LATER, "--max_restart=1")
    wait_until_warm(run)
    (tmp_path / "die.0").touch()
    assert run.wait() == 1
    line = (BEGINS + RAISES_LATER).splitlines().index('    raise ValueError("no such sample")') + 1
    box = run.told[run.told.index("+--") :]
    assert "rank 1 (node 0, cpu) failed" in box and "ValueError: no such sample" in box and f"train.py:{line}, in <module>" in box
    last = run.log(1).split("--- attempt 2")[1]
    assert "on the way" in last and f'train.py", line {line}, in <module>' in last
    assert "worker.py" not in last and "forker.py" not in last
    assert run.left_behind() == []


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["int", "term", "kill"],
)
def test_a_signal_ends_forked_ranks_and_all_that_they_started(
    fleetruns: Launchers, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    run = start(fleetruns, tmp_path, BEGINS + HAS_CHILDREN, "--max_restart=1")
    warm = wait_until_warm(run)
    (tmp_path / "die.0").touch()
    wait_until(lambda: all((tmp_path / f"trains.{rank}").exists() for rank in (0, 1)))
    forked = ranks_of(run, 1)
    assert not any(own for _, own in forked.values()) and warm in run.left_behind()
    run.send(signum)
    wait_until(lambda: not run.is_running() and run.left_behind() == [])
    assert run.wait() == code


def test_without_its_process_to_fork_from_a_restart_executes_and_the_next_one_forks_again(
    fleetruns: Launchers, tmp_path: Path
) -> None:
    run = start(fleetruns, tmp_path, BEGINS + DIES, "--max_restart=3")
    first = wait_until_warm(run)
    os.kill(first, signal.SIGKILL)
    (tmp_path / "die.0").touch()
    assert all(own for _, own in ranks_of(run, 1).values())
    assert "without the warm process: it has ended" in run.told
    second = wait_until_warm(run, 2)
    (tmp_path / "die.1").touch()
    assert not any(own for _, own in ranks_of(run, 2).values())
    os.kill(second, signal.SIGSTOP)  # it takes no request
    (tmp_path / "die.2").touch()
    assert all(own for _, own in ranks_of(run, 3).values())
    assert "without the warm process: it gave no ranks" in run.told
    (tmp_path / "die.3").touch()
    assert run.wait() == 137 and run.left_behind() == []


def test_off_and_no_restart_leave_no_process_beside_the_ranks(fleetruns: Launchers, tmp_path: Path) -> None:
    for number, flags in enumerate((("--max_restart=1", "--warm_restart=off"), ())):
        run = start(fleetruns, tmp_path / str(number), BEGINS + DIES, *flags)
        executed = ranks_of(run, 0)
        assert all("imports" not in path.name for path in Path(tmp_path).rglob("imports.*"))
        assert len(run.left_behind()) == 1 + len(executed)  # with the guardian
        run.send(signal.SIGKILL)
        wait_until(lambda run=run: run.left_behind() == [])  # type: ignore[misc]
