"""What the gradient noise scale costs: step time with a measurement in every update, and in every tenth, over that without.

    python bench/noise_scale.py                    two gloo ranks on the CPU
    python bench/noise_scale.py --device cuda      two gloo ranks that share a GPU

Rows, for the models of bench/overhead.py, one of them also with four merged micro-batches: the median of paired blocks. A block
is ten updates, so that each holds the same number of measurements. `off_off` is off against itself: what the machine's
own noise makes of a ratio of 1.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fleetx import fleet
from overhead import CASES, MERGE, join, paired, start
from results import publish

UPDATES = 10
ROWS = {"resnet18": ("resnet18", 1), "mlp200": ("mlp200", 1), f"mlp200_merge{MERGE}": ("mlp200", MERGE)}
VARIANTS = {"off_off": 0, "every": 1, "every_tenth": 10}


def make_step(make: Callable[[], nn.Module], data: Any, device: torch.device, *, every: int, merge: int) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = make().to(device)
    strategy = fleet.DistributedStrategy(noise_scale_steps=every, desync_check_steps=0)
    if merge > 1:
        strategy.gradient_merge, strategy.gradient_merge_configs = True, {"k_steps": merge}
    with contextlib.redirect_stdout(None):
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), strategy)
    x, y = data

    def step() -> Any:
        for _ in range(merge):
            report = optimizer.minimize(F.cross_entropy(model(x), y))
        return report

    return step


def compare(make: Callable[[], nn.Module], data: Any, device: torch.device, *, merge: int, blocks: int) -> dict[str, Any]:
    rows = {}
    for name, every in VARIANTS.items():
        measuring = make_step(make, data, device, every=every, merge=merge)
        off = make_step(make, data, device, every=0, merge=merge)
        row = paired(measuring, off, blocks=blocks, steps=UPDATES, device=device)
        row["off_ms"], row["on_ms"] = row.pop("ddp_ms"), row.pop("ours_ms")
        row["noise_scale"] = measuring().noise_scale
        rows[name] = row
    return rows


def worker(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    device, figures = join(rank, size, port, args)
    for label, (case, merge) in ROWS.items():
        make, shape, rows = CASES[case]
        torch.manual_seed(rank)
        data = torch.randn(rows, *shape, device=device), torch.randint(0, 10, (rows,), device=device)
        figures[label] = compare(make, data, device, merge=merge, blocks=args.blocks)
        if rank == 0:
            print(f"{label:16} {figures[label]}", flush=True)
    if rank == 0:
        publish(args.name, figures)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--name", default=None)
    args = parser.parse_args()
    args.nccl = False
    args.name = args.name or ("noise_scale" if args.device == "cpu" else "noise_scale_cuda")
    start(worker, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
