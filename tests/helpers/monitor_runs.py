"""Runs with a monitor, for tests: what ranks do, and what the folder then holds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from tests.helpers.models import batch, mlp


def records(folder: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path | str) -> dict[str, Any]:
    return json.loads((Path(folder) / "summary.json").read_text())


def environment(folder: Path | str) -> dict[str, Any]:
    return json.loads((Path(folder) / "environment.json").read_text())


def pair(lr: float = 0.1, **strategy: Any) -> tuple[torch.nn.Module, Any]:
    from fleetx import fleet

    model = mlp()
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr, momentum=0.9), fleet.DistributedStrategy(**strategy))


def train(folder: str, updates: int, *, slow_rank: int | None = None, slow_s: float = 0.0, **monitor: Any) -> list[float]:
    """The losses, with a monitor that is told of every micro-step; returns those of this rank."""
    from fleetx import fleet

    model, optimizer = pair()
    rank, losses = fleet.worker_index(), []
    with fleet.Monitor(folder, total_steps=updates, show=False, tensorboard=False, **monitor) as watch:
        for index in range(updates):
            x, y = batch(2 * index + rank)
            if rank == slow_rank:
                time.sleep(slow_s)
            report = optimizer.minimize(torch.nn.functional.cross_entropy(model(x), y))
            losses.append(report.loss)
            watch.log(report, samples=len(x))
    return losses
