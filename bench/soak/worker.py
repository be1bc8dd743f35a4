"""One rank of bench/soak: a small net under any strategy, with a checkpoint every few steps and a monitor, that notes each step.

Checkpoints, logs and the monitor's folder lie on a small disk, which may be full for a while.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fleetx import fleet
from fleetx.errors import FleetWarning

BATCH, ROWS = 4, 96
RAMP = {"rampup_begin_step": 4, "rampup_step": 8, "sparsity": [0.75, 0.9], "min_numel": 100}
STRATEGIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "gradient_merge": {"gradient_merge": {"k_steps": 3}},
    "amp": {"amp": {"dtype": "float16", "incr_every_n_steps": 5}},
    "fp16_allreduce": {"fp16_allreduce": True},
    "bf16_allreduce": {"bf16_allreduce": True},
    "powersgd": {"powersgd": {"begin_step": 3, "rank": 2, "min_compression": 1.0}},
    "dgc": {"dgc": RAMP},
    "localsgd": {"localsgd": {"k_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}},
    "adaptive_localsgd": {"adaptive_localsgd": {"init_k_steps": 2}},
    "lars": {"lars": {"lars_coeff": 0.1}},
    "lamb": {"lamb": True},
    "recompute": {"recompute": {"checkpoints": ["middle"]}},
    "sync_batch_norm": {"sync_batch_norm": True},
    "clip_norm": {"clip_norm": {"max_norm": 0.5}},
}
SGD = frozenset(("lars", "dgc", "localsgd", "adaptive_localsgd", "powersgd"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.middle = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.middle(self.norm(self.first(x)).relu()).relu()))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name in SGD:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.0)


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(t for s in state.values() for t in s.values() if isinstance(t, Tensor))]
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def train(args: argparse.Namespace) -> None:
    rank = fleet.worker_index()
    notes = os.open(args.out / "notes" / str(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(ROWS, 16, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator))
    sampler = fleet.sampler(data, seed=3)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    model, criterion = Net(), nn.CrossEntropyLoss()
    strategy = fleet.DistributedStrategy(fuse_grad_size_in_MB=0.01, **STRATEGIES[args.strategy])
    model, optimizer = fleet.distribute(model, optimizer_of(args.strategy, model), strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.95)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    found = fleet.load_checkpoint(args.disk / "checkpoints", **objects)
    step = found.step if found else 0
    with fleet.Monitor(args.disk / "run", show=False, tensorboard=False) as monitor:
        while step < args.steps:
            for x, y in loader:
                report = optimizer.minimize(criterion(model(x), y))
                monitor.log(report)
                if report.due:
                    scheduler.step()
                step += 1
                attempt = os.environ["FLEETX_ATTEMPT"]
                os.write(notes, f"{attempt} {step} {os.getpid()} {time.monotonic_ns()}\n".encode())
                print("step", step)
                time.sleep(args.pause)
                if step % args.save_every == 0 or step == args.steps:
                    fleet.save_checkpoint(args.disk / "checkpoints", step=step, keep=2, on_save_error="warn", **objects)
                if step == args.steps:
                    break
    (args.out / f"final-{rank}.json").write_text(json.dumps({"sha256": fingerprint(model, optimizer)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save_every", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of sleep in each step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("default", FleetWarning)
    fleet.init()
    torch.manual_seed(100 + fleet.worker_index())
    train(args)


if __name__ == "__main__":
    main()
