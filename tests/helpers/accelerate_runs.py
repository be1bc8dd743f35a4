"""For tests of Accelerate and of what is built on it: each case as if in a process of its own."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleetx import fleet

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_SECONDS = 240
LIMIT = {"rtol": 1e-6, "atol": 1e-6}


@contextlib.contextmanager
def fresh(rank: int) -> Iterator[None]:
    """No Accelerator before this one, and a launcher's variables, which Accelerate reads."""
    from accelerate.state import AcceleratorState, GradientState

    told = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.update({name: str(value) for name, value in told.items()}, OMP_NUM_THREADS="1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def computes_in(model: nn.Module) -> str:
    """The dtype inside of it: what amp computes in 16 bits comes out in 32 again."""
    seen: list[str] = []
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    handle = first.register_forward_hook(lambda _, __, out: seen.append(str(out.dtype)))
    model(torch.ones(2, first.in_features))
    handle.remove()
    return seen[0]


def strategy_of(**settings: Any) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(fuse_grad_size_in_MB=0.001, **settings)


def changed_lines(before: str, after: str) -> int:
    """Lines that are added or written otherwise."""
    return sum(line.startswith("+ ") for line in difflib.ndiff(before.splitlines(), after.splitlines()))


def run_example(name: str, *launcher: str) -> float:
    """On two ranks, as a user starts it; the accuracy that it prints."""
    told = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FLEETX_TTY"}
    env = {key: value for key, value in os.environ.items() if key not in told} | {"OMP_NUM_THREADS": "1", "FLEETX_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-m", *launcher, str(EXAMPLES / name)],
            cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "2 processes" in ended.stdout, ended.stdout
    return float(re.findall(r"test accuracy ([\d.]+)%", ended.stdout)[-1])
