"""A short training that saves every update: the same function in a forked rank, an executed one and a rank of the pool."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch

from fleetx import fleet

STEPS, LAST_BEFORE_THE_KILL = 8, 4


def train(rank: int, folder: str, before_step: Callable[[int], None] = lambda step: None) -> str:
    """Train to the last step, from the last checkpoint in the folder; return a hash of the weights and of random numbers."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    model, optimizer = fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01), fleet.DistributedStrategy())
    path = Path(folder) / "checkpoints"
    found = fleet.load_checkpoint(path, model=model, optimizer=optimizer)
    for step in range(found.step + 1 if found else 1, STEPS + 1):
        before_step(step)
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.minimize(model(batch).square().mean())
        fleet.save_checkpoint(path, step=step, model=model, optimizer=optimizer)
    hasher = hashlib.sha256(torch.rand(4).numpy().tobytes())
    for tensor in model.state_dict().values():
        hasher.update(tensor.numpy().tobytes())
    return hasher.hexdigest()


def die_once(step: int) -> None:
    """End rank 1's first attempt before this step, when the test allows it: a restart has its process to fork from then."""
    if os.environ["FLEETX_ATTEMPT"] == "0" and os.environ["RANK"] == "1" and step > LAST_BEFORE_THE_KILL:
        from tests.helpers.launchers import wait_until

        wait_until(Path("die").exists)
        os.kill(os.getpid(), 9)
