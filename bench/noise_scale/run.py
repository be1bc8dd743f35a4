"""What the gradient noise scale costs: step time with a measurement in every update, and in every tenth, over that without.

    python -m bench.noise_scale.run                    two gloo ranks on the CPU
    python -m bench.noise_scale.run --device cuda      two gloo ranks that share a GPU

Rows, for the models of bench/overhead, one of them also with four merged micro-batches: the median of paired blocks. A block
is ten updates, so that each holds the same number of measurements. `off_off` is off against itself: what the machine's
own noise makes of a ratio of 1. `measurement_ms` is one measurement taken by itself, after a backward: the norms of this rank's
own gradients and the collective of three numbers; `measurement_share` is its part of an update.
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
from bench.overhead.run import CASES, MERGE, join, paired, start
from fleetx import fleet
from fleetx.engine.buckets import global_norm
from fleetx.engine.noise_scale import NoiseScaleMeter
from fleetx.engine.slots import Merge
from fleetx.engine.window import Window

UPDATES = 10
ROWS = {"resnet18": ("resnet18", 1), "mlp200": ("mlp200", 1), f"mlp200_merge{MERGE}": ("mlp200", MERGE)}
VARIANTS = {"off_off": 0, "every": 1, "every_tenth": 10}


def make_step(
    make: Callable[[], nn.Module], data: Any, device: torch.device, *, every: int, merge: int
) -> tuple[Callable[[], Any], Any]:
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

    return step, optimizer


def measurement_seconds(optimizer: Any, device: torch.device) -> float:
    """From the reduced gradients' norm, which a step has anyway, to new running means."""
    pipeline, times = optimizer.pipeline, []
    meter, window = NoiseScaleMeter(1, merge=Merge(), comm=pipeline.comm), Window(micro_steps=1)
    norm = global_norm(pipeline.buckets.flats)
    for _ in range(30):
        dist.barrier()
        start = time.perf_counter()
        meter.begin_reduce()
        for bucket in pipeline.buckets:
            meter.before_reduce(bucket)
        meter.after_reduce(norm, pipeline.buckets, window, pipeline.weighing, finite=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare(make: Callable[[], nn.Module], data: Any, device: torch.device, *, merge: int, blocks: int) -> dict[str, Any]:
    rows = {}
    for name, every in VARIANTS.items():
        (measuring, optimizer), (off, _) = (make_step(make, data, device, every=n, merge=merge) for n in (every, 0))
        row = paired(measuring, off, blocks=blocks, steps=UPDATES, device=device)
        row["off_ms"], row["on_ms"] = row.pop("ddp_ms"), row.pop("ours_ms")
        row["noise_scale"] = measuring().noise_scale
        rows[name] = row
    once = measurement_seconds(optimizer, device)
    return rows | {"measurement_ms": round(once * 1e3, 3), "measurement_share": round(once * 1e3 / rows["off_off"]["off_ms"], 4)}


def worker(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    device, figures = join(rank, size, port, args)
    for label in args.rows.split(","):
        case, merge = ROWS[label]
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
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--name", default=None)
    args = parser.parse_args()
    args.nccl = False
    args.name = args.name or ("noise_scale" if args.device == "cpu" else "noise_scale_cuda")
    start(worker, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
