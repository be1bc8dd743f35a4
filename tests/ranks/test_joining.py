"""Processes that a launcher started join one job, or are refused in words: none of them trains alone beside the others."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.documents import clean_environment

LIMIT_SECONDS = 120

JOINS = """
    import torch
    from fleetx import fleet

    fleet.init()
    print(f"worker {fleet.worker_index()} of {fleet.worker_num()}", flush=True)
"""
SPAWNS = """
    import os
    import sys
    import torch
    from fleetx import fleet
    from fleetx.errors import ConfigError

    def train(rank, port, names):
        values = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: values[name] for name in names})
        try:
            fleet.init()
            print(f"worker {fleet.worker_index()} of {fleet.worker_num()}", flush=True)
        except ConfigError as refused:
            print(f"refused: {refused}", flush=True)

    if __name__ == "__main__":
        torch.multiprocessing.spawn(train, args=(sys.argv[1], sys.argv[2:]), nprocs=2)
"""


def environment(**variables: str) -> dict[str, str]:
    return clean_environment() | {"FLEETX_DEVICE": "cpu", "OMP_NUM_THREADS": "1"} | variables


def start(script: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.Popen(command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def output_of(*processes: subprocess.Popen[str]) -> str:
    ended = [process.communicate(timeout=LIMIT_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), ended
    return "".join(out for out, _ in ended)


def workers_in(output: str) -> list[str]:
    """Two processes on one pipe may write into each other's lines, but not into each other's words."""
    return sorted(re.findall(r"worker \d of \d", output))


def test_processes_of_mpich_join(tmp_path: Path) -> None:
    script, job = written(tmp_path, JOINS), str(uuid.uuid4())
    ranks = [{"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)} for rank in range(2)]
    common = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "PBS_JOBID": job}
    started = [start(script, **mine, **common) for mine in ranks]
    assert [workers_in(output_of(process)) for process in started] == [["worker 0 of 2"], ["worker 1 of 2"]]


@pytest.mark.parametrize("names", [["RANK", "WORLD_SIZE"], ["MASTER_ADDR", "MASTER_PORT"]], ids=" ".join)
def test_a_function_of_spawn_that_sets_half_of_the_variables_is_refused_in_every_process(
    tmp_path: Path, names: list[str]
) -> None:
    output = output_of(start(written(tmp_path, SPAWNS), free_port(), *names))
    assert output.count(f"refused: {names[0]} and {names[1]} are set, but") == 2


def test_a_function_of_spawn_that_sets_them_all_joins(tmp_path: Path) -> None:
    output = output_of(start(written(tmp_path, SPAWNS), free_port(), "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    assert workers_in(output) == ["worker 0 of 2", "worker 1 of 2"]


def test_accelerate_launch_joins_or_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    script = str(written(tmp_path, JOINS))
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    variables = environment(HF_HOME=str(tmp_path))
    options: dict[str, Any] = {"env": variables, "capture_output": True, "text": True, "timeout": LIMIT_SECONDS}
    port = ["--main_process_port", free_port()]
    joined = subprocess.run([*launch, "--multi_gpu", "--num_processes", "2", *port, script], **options)
    assert joined.returncode == 0, joined.stderr
    assert workers_in(joined.stdout) == ["worker 0 of 2", "worker 1 of 2"]
    alone = subprocess.run([*launch, "--cpu", "--num_processes", "2", script], **options)
    assert alone.returncode != 0
    assert "ConfigError: accelerate launch has started one process" in alone.stderr
