"""What the guards cost: the look for NaN and Inf in every update, and the comparison of ranks in every hundredth.

    python -m bench.guards.run                    two gloo ranks on the CPU
    python -m bench.guards.run --device cuda      two gloo ranks that share a GPU
    python -m bench.guards.run --nccl             one NCCL rank: the look alone, since there is no other rank to compare with

Rows, for the models of bench/overhead: step time with on_nan_inf="stop" over that with "off" (paired blocks), and the
time of one comparison of ranks as a share of a hundred steps.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from bench.lib.results import publish
from bench.overhead.run import CASES, join, paired, seconds, start
from fleetx import fleet

EVERY = 100


def make_step(make: Callable[[], nn.Module], data: Any, device: torch.device, mode: str) -> tuple[Callable[[], None], Any]:
    torch.manual_seed(0)
    model = make().to(device)
    strategy = fleet.DistributedStrategy(on_nan_inf=mode, desync_check_steps=0)
    with contextlib.redirect_stdout(None):
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), strategy)
    x, y = data

    def step() -> None:
        optimizer.minimize(F.cross_entropy(model(x), y))

    return step, optimizer


def comparison_seconds(optimizer: Any, device: torch.device) -> float:
    """One comparison from begin to end, the device's work included."""
    check, times = optimizer.pipeline.checks.ranks, []
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        check._begin(EVERY)
        if check._pending is not None:
            check._finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def worker(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    device, figures = join(rank, size, port, args)
    for name, (make, shape, rows) in CASES.items():
        torch.manual_seed(rank)
        data = torch.randn(rows, *shape, device=device), torch.randint(0, 10, (rows,), device=device)
        (guarded, optimizer), (bare, _) = (make_step(make, data, device, mode) for mode in ("stop", "off"))
        steps = args.steps if name == "resnet18" else args.steps * 4
        row = paired(guarded, bare, blocks=args.blocks, steps=steps, device=device)
        row["off_ms"] = row.pop("ddp_ms")
        row["stop_ms"] = row.pop("ours_ms")
        if size > 1:
            once, step_seconds = comparison_seconds(optimizer, device), seconds(guarded, steps, device)
            row["comparison_ms"] = round(once * 1e3, 3)
            row["comparison_share"] = round(once / (EVERY * step_seconds), 5)
        figures[name] = row
        if rank == 0:
            print(f"{name:10} {row}", flush=True)
    if rank == 0:
        publish(args.name, figures)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--name", default=None)
    args = parser.parse_args()
    args.device = "cuda" if args.nccl else args.device
    args.name = args.name or ("guards_nccl" if args.nccl else "guards" if args.device == "cpu" else "guards_cuda")
    start(worker, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
