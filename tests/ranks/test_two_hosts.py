"""fleetrun over a real network: two hosts with addresses of their own, a cable between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.hosts import Host, two_hosts

SOURCE = Path(__file__).parents[2] / "src"
LIMIT_SECONDS = 90.0
TRAIN = """
import os, sys, time
import psutil, torch
import torch.distributed as dist
from fleetx import fleet
fleet.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
folder, rank = sys.argv[1], fleet.worker_index()
found = fleet.load_checkpoint(os.path.join(folder, "checkpoints"), model=model, optimizer=optimizer)
start = found.step if found else 0
for step in range(start + 1, 61):
    optimizer.minimize(model(torch.full((2, 4), float(step + rank))).sum())
    if step % 10 == 0:
        fleet.save_checkpoint(os.path.join(folder, "checkpoints"), step=step, model=model, optimizer=optimizer)
    with open(os.path.join(folder, f"step.{rank}"), "w") as file:
        file.write(f"{step} {os.getpid()}")
    time.sleep(0.03)
listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
listening |= {c.laddr.ip for c in psutil.Process(os.getppid()).net_connections() if c.status == psutil.CONN_LISTEN}
print("rank", rank, "of", fleet.worker_num(), "nodes", fleet.node_num(), "from", start, "sum", model.weight.sum().item())
print("listening", *sorted(listening), flush=True)
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as made:
        yield made


def start(host: Host, folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = host.command(sys.executable, "-m", "fleetx.launch", "--log_dir", "log", *flags, "train.py", str(folder))
    env = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.02)


def finish(jobs: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    ended = []
    for job in jobs:
        try:
            out, err = job.communicate(timeout=LIMIT_SECONDS)
        finally:
            job.kill()
        ended.append((job.returncode, out + err))
    return ended


def test_each_host_finds_itself_in_the_list_and_listens_on_its_own_address_only(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ["--nproc_per_node", "1", "--ips", ",".join(host.address for host in hosts)]
    ended = finish([start(host, tmp_path, *flags) for host in reversed(hosts)])[::-1]
    assert [code for code, _ in ended] == [0, 0], ended
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(2)]
    for rank, log in enumerate(logs):
        assert f"rank {rank} of 2 nodes 2 from 0 sum" in log
        assert f"listening {hosts[rank].address}" in log
    assert len({log.partition(" sum ")[2].splitlines()[0] for log in logs}) == 1


def test_a_rank_killed_on_one_host_restarts_both_from_the_checkpoint(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ["--nproc_per_node", "1", "--max_restart", "2", "--nnodes", "2", "--master", f"{hosts[0].address}:7171"]
    jobs = [start(host, tmp_path, *flags) for host in hosts]
    steps = tmp_path / "step.1"
    wait_until(lambda: steps.exists() and int((steps.read_text() or "0").split()[0]) > 25)
    os.kill(int(steps.read_text().split()[1]), signal.SIGKILL)
    ended = finish(jobs)
    assert [code for code, _ in ended] == [0, 0], ended
    assert all("restarting (1 of 2): rank 1 " in told for _, told in ended)
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(2)]
    started = {int(log.partition(" nodes 2 from ")[2].split()[0]) for log in logs}
    assert len(started) == 1 and started <= {20, 30, 40}
