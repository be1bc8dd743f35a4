"""Where ranks and nodes meet: sockets on one address only, and two launchers on this machine that act as two nodes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fleetx.errors import LaunchError
from fleetx.launch import rendezvous
from tests.helpers.launchers import USES_PROGRESS, Launcher, Launchers, launchers, wait_until
from tests.helpers.limits import within

INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.2", "fe80::1"], "eth1": ["10.1.0.2"]}
GONE_SECONDS = 8.0
LOST_SECONDS = 30.0
"""Limit for the end of a job whose node was lost: 5 s after its connection was closed, and what a busy machine adds."""

SECRET = "0123456789abcdef0123456789abcdef"

REDUCE = """
import os, pathlib, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
attempt = os.environ["FLEETX_ATTEMPT"]
print("attempt", attempt, "rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item(), flush=True)
if attempt == "0" and dist.get_rank() == int(os.environ.get("DIES", -1)):
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path(f"met.{dist.get_rank()}").touch()
while os.environ.get("STAYS"):
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""
PLAIN = """
import os, pathlib, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["FLEETX_ATTEMPT"])
print("rank", rank, "local", os.environ["LOCAL_RANK"], "of", os.environ["WORLD_SIZE"], "attempt", attempt, flush=True)
pathlib.Path(f"began.{attempt}.{rank}").touch()
if rank == int(os.environ.get("DIES", -1)):
    os.kill(os.getpid(), signal.SIGKILL)
if rank == int(os.environ.get("RAISES", -1)):
    raise ValueError("no such sample")
time.sleep(float(os.environ.get("SLEEPS", 600)))
"""

WAITS = (
    USES_PROGRESS
    + """
import time
progress.at_step(5)
with progress.during(progress.Phase.WAIT):
    time.sleep(600)
"""
)
DIES_IN_TURN = """
import os, time
attempt, rank = int(os.environ["FLEETX_ATTEMPT"]), int(os.environ["RANK"])
if attempt < 8:
    if attempt % 3 in (rank, 2):  # one, the other, both
        os.kill(os.getpid(), 9)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def fleetruns() -> Iterator[Launchers]:
    with launchers() as started:
        yield started


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start_node(
    fleetruns: Launchers, folder: Path, node: int, port: int, script: str, *flags: str, process_count: int = 1, **variables: str
) -> Launcher:
    """Node 1 has an address of its own, and gets its number in order of arrival."""
    where = ["--nnodes=2", f"--master=127.0.0.1:{port}", f"--host=127.0.0.{node + 1}", f"--nproc_per_node={process_count}"]
    return fleetruns.start(folder / f"node{node}", script, *where, *flags, **variables)


def start_both(fleetruns: Launchers, folder: Path, port: int, script: str, *flags: str, **variables: str) -> list[Launcher]:
    return [start_node(fleetruns, folder, node, port, script, *flags, **variables) for node in (0, 1)]


def begun(run: Launcher, attempt: int, rank: int) -> bool:
    return (run.folder / f"began.{attempt}.{rank}").exists()


def listening_addresses(run: Launcher) -> set[str]:
    found = set()
    for pid in {run.pid, *run.left_behind()}:
        for entry in psutil.Process(pid).net_connections("inet"):
            if entry.status == psutil.CONN_LISTEN:
                found.add(entry.laddr.ip)
    return found


def test_the_ranks_sockets_stay_on_the_interface_of_their_node() -> None:
    def variables(address: str, *, is_only_node: bool, **inherited: str) -> dict[str, str]:
        return rendezvous.socket_variables(address, is_only_node=is_only_node, interfaces=INTERFACES, inherited=inherited)

    assert variables("127.0.0.1", is_only_node=True) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert variables("10.1.0.2", is_only_node=False) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert variables("127.0.0.2", is_only_node=False) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert variables("192.168.0.7", is_only_node=False) == {}
    assert variables("127.0.0.1", is_only_node=True, NCCL_SOCKET_IFNAME="eth0") == {"GLOO_SOCKET_IFNAME": "lo"}


def test_a_store_listens_on_its_address_only() -> None:
    store = rendezvous.open_store("127.0.0.1")
    listening = [entry for entry in psutil.Process().net_connections("tcp") if entry.status == psutil.CONN_LISTEN]
    assert {entry.laddr.ip for entry in listening if entry.laddr.port == store.port} == {"127.0.0.1"}
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_busy_port_is_refused_with_the_process_that_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with (
            within(30, "refusing the port"),
            pytest.raises(LaunchError, match=f"port {port} of 127.0.0.1 is held by .* \\(process {os.getpid()}\\)"),
        ):
            rendezvous.listen_on("127.0.0.1", port)


def test_on_a_single_node_nothing_listens_beyond_loopback(fleetruns: Launchers, tmp_path: Path) -> None:
    run = fleetruns.start(tmp_path, REDUCE, "--nproc_per_node=2", STAYS="1")
    wait_until(lambda: all((tmp_path / f"met.{rank}").exists() for rank in (0, 1)))
    assert listening_addresses(run) == {"127.0.0.1"}
    run.send(signal.SIGTERM)
    assert run.wait() == 143


def test_a_kill_on_one_node_restarts_both_and_ranks_are_numbered_node_by_node(
    fleetruns: Launchers, tmp_path: Path, port: int
) -> None:
    first = start_node(fleetruns, tmp_path, 0, port, REDUCE, "--max_restart=2", DIES="2")
    second = start_node(fleetruns, tmp_path, 1, port, REDUCE, "--max_restart=2", process_count=2, DIES="2")
    assert (first.wait(), second.wait()) == (0, 0), first.told + second.told
    for run, ranks in ((first, [0]), (second, [1, 2])):
        assert "restarting (1 of 2): rank 2 on node 1 (127.0.0.2) failed: killed by SIGKILL" in run.told
        for rank in ranks:
            lines = [line for line in run.log(rank).splitlines() if line.startswith("attempt")]
            assert lines == [f"attempt {attempt} rank {rank} of 3 sum 6.0" for attempt in (0, 1)]


def test_a_spent_budget_ends_all_nodes_with_the_cause_and_its_exit_code(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    runs = start_both(fleetruns, tmp_path, port, PLAIN, "--max_restart=1", DIES="1")
    assert [run.wait() for run in runs] == [137, 137]
    assert all(run.told.count("restarting (1 of 1)") == 1 for run in runs)
    assert "rank 1 on node 1 (127.0.0.2) failed: killed by SIGKILL" in runs[0].told.split("restarting")[1].partition("\n")[2]
    assert [run.left_behind() for run in runs] == [[], []]


def test_an_exception_on_one_node_is_told_on_the_other(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    runs = start_both(fleetruns, tmp_path, port, PLAIN, RAISES="1")
    assert [run.wait() for run in runs] == [1, 1]
    assert all("ValueError: no such sample" in run.told for run in runs)


def test_a_killed_launcher_ends_the_other_node_with_its_name(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    first, second = start_both(fleetruns, tmp_path, port, PLAIN)
    wait_until(lambda: begun(first, 0, 0) and begun(second, 0, 1))
    second.send(signal.SIGKILL)
    assert first.wait(LOST_SECONDS) == 1
    assert "node 1 (127.0.0.2) is gone" in " ".join(first.told.split())
    wait_until(lambda: first.left_behind() == second.left_behind() == [], 2.0)


def test_when_node_0_is_killed_the_others_end_with_its_name(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    first, second = start_both(fleetruns, tmp_path, port, PLAIN)
    wait_until(lambda: begun(first, 0, 0) and begun(second, 0, 1))
    first.send(signal.SIGKILL)
    assert second.wait(LOST_SECONDS) == 1
    assert "node 0 (127.0.0.1) is gone" in " ".join(second.told.split())
    wait_until(lambda: first.left_behind() == second.left_behind() == [], 2.0)


def test_a_launcher_that_is_suspended_for_longer_than_the_grace_counts_as_gone(
    fleetruns: Launchers, tmp_path: Path, port: int
) -> None:
    first, second = start_both(fleetruns, tmp_path, port, PLAIN, "--node_grace=2")
    wait_until(lambda: begun(first, 0, 0) and begun(second, 0, 1))
    second.send(signal.SIGSTOP)
    assert first.wait(LOST_SECONDS) == 1
    assert "node 1 (127.0.0.2) is gone" in " ".join(first.told.split())
    second.send(signal.SIGCONT)
    assert second.wait(GONE_SECONDS) == 1


def test_a_stop_on_one_node_stops_all(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    first, second = start_both(fleetruns, tmp_path, port, PLAIN, "--max_restart=3")
    wait_until(lambda: begun(first, 0, 0) and begun(second, 0, 1))
    second.send(signal.SIGTERM)
    assert (first.wait(GONE_SECONDS), second.wait(GONE_SECONDS)) == (143, 143)
    assert "stopping (SIGTERM on node 1)" in first.told and "stopping (SIGTERM);" in second.told
    wait_until(lambda: first.left_behind() == second.left_behind() == [], 2.0)


def test_a_stop_while_waiting_for_the_other_nodes_ends_at_once(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    for node, signum, code in ((0, signal.SIGINT, 130), (1, signal.SIGTERM, 143)):
        run = start_node(fleetruns, tmp_path, node, port, PLAIN)
        wait_until(lambda run=run: "waiting up to 600 s for node" in run.told)  # type: ignore[misc]
        run.send(signum)
        assert run.wait(2.0) == code
        assert run.left_behind() == []


def test_a_node_that_does_not_come_is_named_with_its_address(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    where = ["--ips=127.0.0.1,127.0.0.2", "--host=127.0.0.1", f"--start_port={port}", "--nproc_per_node=1"]
    run = fleetruns.start(tmp_path / "node0", PLAIN, *where)
    wait_until(lambda: "waiting up to 600 s for node 1 (127.0.0.2) of 2" in run.told)
    run.send(signal.SIGINT)
    assert run.wait(2.0) == 130


def test_a_node_that_is_done_waits_for_the_others(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    first = start_node(fleetruns, tmp_path, 0, port, PLAIN, SLEEPS="0")
    second = start_node(fleetruns, tmp_path, 1, port, PLAIN, SLEEPS="1.5")
    assert (first.wait(), second.wait()) == (0, 0), first.told + second.told


@pytest.mark.parametrize(
    ("flag", "named"),
    [("--nnodes=3", "--nnodes 3"), ("--max_restart=1", "--max_restart 1")],
)
def test_nodes_started_differently_are_refused_on_all(
    fleetruns: Launchers, tmp_path: Path, port: int, flag: str, named: str
) -> None:
    first = start_node(fleetruns, tmp_path, 0, port, PLAIN, FLEETX_JOB_SECRET=SECRET)
    second = start_node(fleetruns, tmp_path, 1, port, PLAIN, flag, FLEETX_JOB_SECRET=SECRET)
    assert (first.wait(GONE_SECONDS), second.wait(GONE_SECONDS)) == (1, 1)
    for run in (first, second):
        assert named in run.told and len(run.told.splitlines()) == 1


@pytest.mark.parametrize(
    ("flag", "named", "told"),
    [
        ("--nnodes=3", "--nnodes 3", "--nnodes 3"),
        ("--job_id=other", "--job_id", "another --job_id or job secret"),
    ],
)
def test_without_a_secret_a_node_started_differently_ends_alone_and_node_0_says_why(
    fleetruns: Launchers, tmp_path: Path, port: int, flag: str, named: str, told: str
) -> None:
    first = start_node(fleetruns, tmp_path, 0, port, PLAIN)
    second = start_node(fleetruns, tmp_path, 1, port, PLAIN, flag)
    assert second.wait(LOST_SECONDS) == 1
    assert named in " ".join(second.told.split())
    wait_until(lambda: told in first.told)
    assert first.is_running()
    third = start_node(fleetruns, tmp_path / "right", 1, port, PLAIN)
    wait_until(lambda: begun(first, 0, 0) and begun(third, 0, 1))
    first.send(signal.SIGTERM)
    assert (first.wait(GONE_SECONDS), third.wait(GONE_SECONDS)) == (143, 143)


def test_a_hang_on_one_node_is_named_there_and_ends_both(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    first, second = start_both(fleetruns, tmp_path, port, PLAIN)
    wait_until(lambda: begun(first, 0, 0) and begun(second, 0, 1))
    worker = next(process for process in psutil.Process(second.pid).children() if "worker.py" in " ".join(process.cmdline()))
    worker.suspend()
    assert (first.wait(GONE_SECONDS), second.wait(GONE_SECONDS)) == (137, 137)
    assert "rank 1 hangs: stopped (SIGSTOP)" in second.told
    assert "rank 1 on node 1 (127.0.0.2) failed: hung, stopped (SIGSTOP)" in " ".join(first.told.split())


def test_ranks_that_wait_for_each_other_on_all_nodes_are_all_named(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    first, second = start_both(fleetruns, tmp_path, port, WAITS, "--hang_timeout=1")
    assert (first.wait(GONE_SECONDS), second.wait(GONE_SECONDS)) == (137, 137)
    for rank, run in enumerate((first, second)):
        assert f"rank {rank} hangs: silent for" in run.told and "in a collective, at step 5" in run.told


@pytest.mark.campaign
def test_many_kills_on_both_nodes_cost_one_restart_each(fleetruns: Launchers, tmp_path: Path, port: int) -> None:
    first, second = start_both(fleetruns, tmp_path, port, DIES_IN_TURN, "--max_restart=8")
    assert (first.wait(), second.wait()) == (0, 0), first.told + second.told
    for run in (first, second):
        assert [f"restarting ({number} of 8)" in run.told for number in range(1, 9)] == [True] * 8
