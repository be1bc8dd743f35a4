"""One rank of bench/stragglers: steps whose time is set by sleeping, some of them three times as long. Rank 0 prints JSON."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from fleetx import fleet

STEP_SECONDS = 0.1
PAUSE_STEPS, PAUSE_CHANCE = 2, 0.1
STRATEGIES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "localsgd k=16": {"localsgd": True, "localsgd_configs": {"k_steps": 16}},
}


def train(settings: dict[str, Any], steps: int, *, pauses: bool) -> tuple[float, dict[int, float]]:
    """Seconds, and how long each rank waited for the others, as the reports tell."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    chance = random.Random(1000 + fleet.worker_index())
    x = torch.randn(4, 64)
    optimizer.minimize(model(x).square().mean())  # the dense one that Local SGD begins with
    waited: dict[int, float] = defaultdict(float)
    fleet.barrier_worker()
    start = time.perf_counter()
    for _ in range(steps):
        slow = pauses and chance.random() < PAUSE_CHANCE
        time.sleep(STEP_SECONDS * (1 + PAUSE_STEPS * slow))
        report = optimizer.minimize(model(x).square().mean())
        if report.averaged and report.waited is not None:
            for rank, seconds in report.waited.items():
                waited[rank] += seconds
    fleet.barrier_worker()
    return time.perf_counter() - start, waited


def main(steps: int) -> None:
    fleet.init()
    figures = {}
    for name, settings in STRATEGIES.items():
        calm, _ = train(settings, steps, pauses=False)
        paused, waited = train(settings, steps, pauses=True)
        waits = {str(rank): round(seconds, 3) for rank, seconds in waited.items()}
        figures[name] = {"calm_seconds": round(calm, 3), "paused_seconds": round(paused, 3), "waited_seconds": waits}
        if fleet.is_first_worker():
            print(name, figures[name], flush=True)
    if fleet.is_first_worker():
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
