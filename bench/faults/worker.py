"""One rank of bench/faults: a small net with BatchNorm and dropout, checkpointed every few steps, that notes each step.

Notes, one line each, in NOTES/RANK:  attempt step pid nanoseconds what
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fleetx import fleet
from fleetx.errors import FleetWarning

BATCH = 4


class Net(nn.Module):
    """Registered in another order than it runs, and cut into several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 4)
        self.norm = nn.BatchNorm1d(64)
        self.first = nn.Linear(16, 64)
        self.middle = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.middle(self.norm(self.first(x)).relu()).relu()))


def make_strategy(args: argparse.Namespace) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy(fuse_grad_size_in_MB=0.01)
    if args.merge > 1:
        strategy.gradient_merge, strategy.gradient_merge_configs = True, {"k_steps": args.merge}
    if args.fp16:
        strategy.amp, strategy.amp_configs = True, {"dtype": "float16", "incr_every_n_steps": 5}
    return strategy


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(t for s in state.values() for t in s.values() if isinstance(t, Tensor))]
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save_every", type=int, default=7)
    parser.add_argument("--merge", type=int, default=1)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds of sleep in each step")
    parser.add_argument("--ballast", type=int, default=0, help="further bytes in each checkpoint, so that a save takes a while")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fleet.init()
    rank = fleet.worker_index()
    torch.manual_seed(100 + rank)
    notes = os.open(args.out / "notes" / str(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(step: int, what: str) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        os.write(notes, f"{attempt} {step} {os.getpid()} {time.monotonic_ns()} {what}\n".encode())

    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(90, 16, generator=generator), torch.randint(0, 4, (90,), generator=generator))
    sampler = fleet.sampler(data, seed=3)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    model, criterion = Net(), nn.CrossEntropyLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on a CPU
        model, optimizer = fleet.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01), make_strategy(args))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20])
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    ballast = torch.zeros(args.ballast, dtype=torch.uint8)
    found = fleet.load_checkpoint(args.out / "checkpoints", **objects)
    step = found.step if found else 0
    note(step, "loaded")
    while step < args.steps:
        for x, y in loader:
            report = optimizer.minimize(criterion(model(x), y))
            if report.due:
                scheduler.step()
            step += 1
            note(step, "step")
            time.sleep(args.pause)
            stop = fleet.should_stop()
            if step % args.save_every == 0 or stop:
                note(step, "save")
                fleet.save_checkpoint(args.out / "checkpoints", step=step, ballast=ballast, **objects)
                note(step, "saved")
            if stop or step == args.steps:
                break
        if fleet.should_stop():
            return
    (args.out / f"final-{rank}.json").write_text(json.dumps({"sha256": fingerprint(model, optimizer)}))


if __name__ == "__main__":
    main()
