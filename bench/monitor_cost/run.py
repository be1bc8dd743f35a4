"""What fleet.Monitor costs: an update with a log call over one without, in turns.

    python -m bench.monitor_cost.run                    two gloo ranks on the CPU
    python -m bench.monitor_cost.run --device cuda      two gloo ranks that share a GPU
    python -m bench.monitor_cost.run --nccl             one NCCL rank

Rows are the models of bench/overhead, and one layer, of which a step is little more than the library itself. The monitor
is open only in its own blocks, and writes every record to a real folder; nothing is shown. Its first updates, in one of which it
looks at the memory many times, are timed apart: `once_ms` is what they take beyond as many without a monitor.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from bench.lib.results import publish
from bench.overhead.run import CASES, join, seconds, start
from fleetx import fleet
from fleetx.monitor.memory_curve import AT_UPDATE


def one_layer() -> nn.Module:
    return nn.Linear(16, 10)


UPDATES = {"resnet18": 1, "mlp200": 10, "one_layer": 100}
"""Of a block, in --steps."""
FIRST = AT_UPDATE + 2
"""Updates of a monitor that are timed apart."""
ROWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {**CASES, "one_layer": (one_layer, (16,), 8)}


def row(make: Callable[[], nn.Module], data: Any, device: torch.device, args: argparse.Namespace, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = make().to(device)
    with contextlib.redirect_stdout(None):
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    x, y = data

    def bare() -> None:
        optimizer.minimize(F.cross_entropy(model(x), y))

    def watched(folder: str) -> tuple[float, float]:
        """Seconds of one of the first updates, and of one of those after them."""
        with fleet.Monitor(folder, show=False, tensorboard=args.tensorboard) as watch:

            def step() -> None:
                watch.log(optimizer.minimize(F.cross_entropy(model(x), y)), samples=len(x))

            return seconds(step, FIRST, device), seconds(step, steps, device)

    blocks = []
    with tempfile.TemporaryDirectory() as folder:
        watched(f"{folder}/warm"), seconds(bare, steps, device)
        for block in range(args.blocks):
            if block % 2:
                blocks.append((*watched(f"{folder}/{block}"), seconds(bare, steps, device)))
            else:
                without = seconds(bare, steps, device)
                blocks.append((*watched(f"{folder}/{block}"), without))
    return {
        "ratio": round(statistics.median(b / c for _, b, c in blocks), 4),
        "added_us": round(statistics.median(b - c for _, b, c in blocks) * 1e6, 1),
        "once_ms": round(statistics.median(FIRST * (a - c) for a, _, c in blocks) * 1e3, 1),
        "bare_ms": round(statistics.median(c for _, _, c in blocks) * 1e3, 3),
    }


def worker(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    device, figures = join(rank, size, port, args)
    for name, (make, shape, rows) in ROWS.items():
        torch.manual_seed(rank)
        data = torch.randn(rows, *shape, device=device), torch.randint(0, 10, (rows,), device=device)
        figures[name] = row(make, data, device, args, args.steps * UPDATES[name])
        if rank == 0:
            print(f"{name:10} {figures[name]}", flush=True)
    if rank == 0:
        publish(args.name, {**figures, "tensorboard": args.tensorboard})
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tensorboard", action="store_true", help="write event files too")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--name", default=None)
    args = parser.parse_args()
    args.device = "cuda" if args.nccl else args.device
    args.name = args.name or ("monitor_cost_nccl" if args.nccl else "monitor_cost" + ("_cuda" if args.device == "cuda" else ""))
    start(worker, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
