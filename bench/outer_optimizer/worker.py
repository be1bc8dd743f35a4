"""One rank of bench/outer_optimizer: all trainings, one after the other. Rank 0 prints one line of JSON."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no stubs
from torch import Tensor, nn

from fleetx import fleet

BATCH, K = 32, 10
LRS = (0.05, 0.2)
"""Learning rates of the ranks' own optimizers."""
NESTEROV = {"outer_momentum": 0.9, "outer_nesterov": True}
SPARSE = {"value_bits": 2, "error_decay": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "average": {"k_steps": K},
    "average, int4": {"k_steps": K, "wire_dtype": "int4"},
    "outer momentum 0.9, outer rate 1": {"k_steps": K, "outer_momentum": 0.9},
    **{f"Nesterov 0.9, outer rate {lr:g}": {"k_steps": K, "outer_lr": lr, **NESTEROV} for lr in (0.1, 0.4, 0.7, 1.0)},
    "Nesterov 0.9, outer rate 0.4, int4": {"k_steps": K, "outer_lr": 0.4, "wire_dtype": "int4", **NESTEROV},
    "64 of 4,096, 2 bits": {"k_steps": K, "top_k": 64, **SPARSE},
    "512 of 4,096, 2 bits": {"k_steps": K, "top_k": 512, **SPARSE},
}
"""The settings of localsgd, by name."""


def digits(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    x = x.float() / 16 - 0.5
    held_out = torch.arange(len(x)) % 5 == 0
    return x[~held_out][rank::size], y[~held_out][rank::size], x[held_out], y[held_out]


def train(configs: dict[str, Any], lr: float, updates: int, seed: int) -> dict[str, float]:
    rank, size = fleet.worker_index(), fleet.worker_num()
    x, y, test_x, test_y = digits(rank, size)
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    strategy = fleet.DistributedStrategy(localsgd=bool(configs), desync_check_steps=0)
    if configs:
        strategy.localsgd_configs = {"begin_step": updates // 20, **configs}
    model, optimizer = fleet.distribute(model, sgd, strategy)
    warm = max(1, updates // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (updates - step) / (updates - warm))
    )
    order = torch.Generator().manual_seed(1000 * seed + rank)
    sent = 0
    for _ in range(updates):
        rows = torch.randint(len(x), (BATCH,), generator=order)
        sent += optimizer.minimize(nn.functional.cross_entropy(model(x[rows]), y[rows])).bytes_sent
        schedule.step()
    with optimizer.averaged(), torch.no_grad():
        training = fleet.util.all_reduce(float(nn.functional.cross_entropy(model(x), y))) / size
        told = model(test_x)
        held_out = float(nn.functional.cross_entropy(told, test_y))
        accuracy = 100 * float((told.argmax(1) == test_y).float().mean())
    return {"training": training, "held_out": held_out, "accuracy": accuracy, "bytes": sent}


def main(updates: int, seeds: int) -> None:
    torch.set_num_threads(1)
    fleet.init()
    rows = {}
    for lr, (name, configs) in itertools.product(LRS, KINDS.items()):
        made = [train(configs, lr, updates, seed) for seed in range(seeds)]
        row: dict[str, Any] = {what: [round(one[what], 5) for one in made] for what in ("training", "held_out", "accuracy")}
        rows[f"{name}, learning rate {lr:g}"] = row | {"settings": configs, "bytes": made[0]["bytes"]}
    if fleet.is_first_worker():
        print(json.dumps({"rows": rows}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
