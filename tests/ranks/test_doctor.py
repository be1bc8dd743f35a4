"""`fleetx doctor` as a user runs it: on this machine, and on one where something is broken for real."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from fleetx.cli.main import main
from fleetx.doctor.trial import check_trial, run_trial
from tests.helpers.hosts import two_hosts
from tests.helpers.launchers import MARK, find_marked, wait_until

SOURCE = Path(__file__).parents[2] / "src"
STRANGE = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NO_COLOR",
}
LIMIT_SECONDS = 120
SMALL = ("--sizes", "4B,64KiB")


def environment(folder: Path, **more: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in STRANGE}
    return plain | {"PYTHONPATH": str(SOURCE), "FLEETX_DEVICE": "cpu", MARK: str(folder)} | more


def doctor(folder: Path, *arguments: str, **more: str) -> tuple[int, str]:
    """A process of its own, as where torch is broken."""
    line = [sys.executable, "-P", "-m", "fleetx.cli", "doctor", *arguments]
    env = environment(folder, **more)
    ended = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no variables but those of `environment`: this process has imported torch already."""
    for name in STRANGE:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"FLEETX_DEVICE": "cpu", MARK: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(out: str) -> str:
    return "\n".join(f"{one['what']} -> {one['fix']}" for one in json.loads(out)["findings"] if one["level"] == "problem")


# --- this machine -----------------------------------------------------------------------------------------------------------


def test_two_real_ranks_add_up_and_the_exit_code_says_whether_there_are_problems(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", "--json", "--sizes", "4B,64KiB,1MiB"])
    found = json.loads(capsys.readouterr().out)
    (table,) = found["all_reduce"]
    assert (table["backend"], table["ranks"]) == ("gloo", 2)
    assert [row["size_bytes"] for row in table["rows"]] == [4, 65536, 1 << 20]
    assert all(row["is_sum_right"] and 0 < row["seconds"] < 10 for row in table["rows"])
    assert code == bool(found["problems"]) and found["ok"] is (code == 0)
    assert list(here.iterdir()) == [], "it looks at the log folder, and makes none"
    assert find_marked(str(here)) == []


def test_words_off_a_terminal_are_plain_and_grouped_by_topic(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--no-bandwidth"])
    lines = capsys.readouterr().out.splitlines()
    topics = [line.split("  ")[0] for line in lines if line[:1].strip()]
    assert topics[:2] == ["versions", "extras"] and "backends" in topics and "own name" in topics
    assert not any("\x1b" in line for line in lines)
    assert "problem" in lines[-1]


@pytest.mark.parametrize("is_coloured", [True, False])
def test_a_terminal_has_colours_unless_no_color_is_set(here: Path, monkeypatch: pytest.MonkeyPatch, is_coloured: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if not is_coloured:
        monkeypatch.setenv("NO_COLOR", "1")
    mine, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        main(["doctor", "--no-bandwidth"])
    shown = b""
    while chunk := _read(mine):
        shown += chunk
    os.close(mine)
    assert b"versions" in shown
    assert (b"\x1b[" in shown) is is_coloured


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # how the end of a terminal reads
        return b""


def test_under_fleetrun_no_ranks_are_started_and_those_that_are_there_are_measured(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", "2", "-m", "fleetx.cli", "doctor", "--json", *SMALL]
    env = environment(tmp_path)
    ended = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    found = json.loads(ended.stdout[ended.stdout.index("{\n") :])
    told = [one["what"] for one in found["findings"] if one["topic"] == "all-reduce"]
    assert "measured between its 2 ranks, without starting others" in told[0]
    assert [row["is_sum_right"] for row in found["all_reduce"][0]["rows"]] == [True, True]
    assert (tmp_path / "log" / "workerlog.1").read_text() == "", "one voice on each node"
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["workerlog.0", "workerlog.1"]


# --- what is broken for real ------------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", "--json", *arguments])
    return code, problems(capsys.readouterr().out)


def test_a_port_that_is_held_is_a_problem_that_names_the_holder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, found = said(capsys, "--no-bandwidth", "--master", f"127.0.0.1:{port}")
    assert code == 1
    assert f"port {port} of 127.0.0.1 is held by" in found and f"(process {os.getpid()})" in found
    assert "--start_port" in found


def test_a_log_folder_that_is_a_file_is_a_problem(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "log").write_text("")
    code, found = said(capsys, "--no-bandwidth")
    assert code == 1 and f"{here / 'log'} cannot be written: Not a directory" in found and "--log_dir" in found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_log_folder_without_the_right_to_write_is_a_problem(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "log").mkdir(mode=0o500)
    code, found = said(capsys, "--no-bandwidth")
    assert code == 1 and "Permission denied" in found


def test_few_open_files_are_a_problem(tmp_path: Path) -> None:
    # In a process of its own: this one may have more than 256 files open by now.
    line = [sys.executable, "-P", "-m", "fleetx.cli", "doctor", "--json", "--no-bandwidth"]
    few = ["bash", "-c", 'ulimit -Sn 256; exec "$@"', "few", *line]
    ended = subprocess.run(few, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=LIMIT_SECONDS)
    code, found = ended.returncode, problems(ended.stdout)
    assert code == 1 and "256 open files are too few" in found and "ulimit -n" in found


def test_a_torch_that_cannot_be_imported_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    code, out = doctor(tmp_path, "--json", "--ips", "127.0.0.1", PYTHONPATH=f"{broken.parent}{os.pathsep}{SOURCE}")
    assert code == 1
    assert "torch cannot be imported: ImportError: libtorch_cpu.so" in problems(out)
    assert f"{broken} is imported in place of the module torch" in problems(out)
    assert json.loads(out)["all_reduce"] == []


def test_an_interface_that_is_not_there_is_told_by_its_variable_and_by_the_ranks(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    code, found = said(capsys, *SMALL)
    assert code == 1
    assert "GLOO_SOCKET_IFNAME=nosuch0 names nosuch0" in found
    assert "2 ranks over gloo: failed" in found and "Unable to find address for: nosuch0" in found


def own_ranks() -> list[psutil.Process]:
    """Of the trial that this process has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it is gone already
            words = child.cmdline()
            if any(word.endswith("worker.py") for word in words) and "fleetx.doctor.exchange" in words:
                found.append(child)
    return found


def rank_of(process: psutil.Process) -> int:
    return int(process.environ()["RANK"])


def trial_with(signum: signal.Signals) -> str:
    """What is told of two ranks, of which rank 1 gets a signal as soon as both are there."""
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(run_trial, 2, ["gloo"], [4, 65536], limit_seconds=60)
        wait_until(lambda: len(own_ranks()) == 2)
        max(own_ranks(), key=rank_of).send_signal(signum)
        (found,) = check_trial(trial.result(LIMIT_SECONDS))
    assert found.level == "problem"
    return f"{found.what} -> {found.fix}"


def test_a_rank_that_dies_is_a_problem_with_the_end_of_the_logs(here: Path) -> None:
    told = trial_with(signal.SIGKILL)
    assert "2 ranks over gloo: failed: fleetrun: rank" in told and "Their logs end with:" in told
    assert find_marked(str(here)) == []


def test_a_rank_that_stands_still_is_a_problem_and_nothing_is_left_behind(here: Path) -> None:
    told = trial_with(signal.SIGSTOP)
    assert "2 ranks over gloo: failed: fleetrun: rank 1 hangs: stopped (SIGSTOP)" in told
    wait_until(lambda: find_marked(str(here)) == [])


def test_ranks_that_come_to_no_end_are_a_problem_after_the_limit_and_nothing_is_left_behind(here: Path) -> None:
    (found,) = check_trial(run_trial(2, ["gloo"], [4], limit_seconds=0.5))  # in which no rank has imported torch
    assert found.level == "problem" and "2 ranks over gloo: hangs: no end within 0.5 s" in found.what
    assert "--limit 300" in found.fix
    wait_until(lambda: find_marked(str(here)) == [])


def test_hosts_of_a_job_are_reached_or_not_over_a_real_network(tmp_path: Path) -> None:
    with two_hosts() as (own_host, there):
        nowhere = own_host.address.rsplit(".", 1)[0] + ".99"
        line = [sys.executable, "-m", "fleetx.cli", "doctor", "--no-bandwidth", "--json"]
        line += ["--ips", f"{own_host.address},{there.namespace},{nowhere}"]
        env = own_host.environment(environment(tmp_path))
        ended = subprocess.run(
            own_host.command(*line), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    found = {one["what"]: one["level"] for one in json.loads(ended.stdout)["findings"] if one["topic"] == "hosts"}
    assert list(found.values()) == ["ok", "ok", "problem"], found
    own, other, missing = found
    assert "this machine, and the port is free" in own
    assert other == f"{there.namespace} ({there.address}), port 6070: the host answers, and no process listens there yet"
    assert missing.startswith(f"{nowhere}, port 6070: no ")
    assert ended.returncode == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--ranks", "1"),
        ("--sizes", "3B"),
        ("--backend", "mpi"),
        ("--master", "a", "--ips", "b"),
        ("--ips", "a,,b"),
        ("--rank", "2"),
    ],
)
def test_flags_that_cannot_be_used_are_told_in_one_line(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
