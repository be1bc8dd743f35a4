"""Is `fleet.distribute` slower than DDP? The same processes, alternating blocks of steps, the median of paired ratios.

    python -m bench.overhead.run            two gloo ranks on the CPU (or sharing one GPU, with --device cuda)
    python -m bench.overhead.run --nccl     one NCCL rank on a GPU

Rows: step time of ours over DDP's for a ResNet-18 at 32x32 and an MLP of 200 tensors; the same with gradient_merge against
DDP + no_sync; both by minimize and by the bare loop (loss.backward(), step(), zero_grad()); and microseconds that ours adds to
one micro-step of a one-layer model without communication.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from bench.lib.results import publish
from fleetx import fleet

MERGE = 4


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def resnet18() -> nn.Module:
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *(Block(*w) for w in widths), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mlp200() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(99):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    for layer in layers[::2]:
        # torch's default shrinks a signal at each layer: after a hundred, gradients are denormal and arithmetic crawls.
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "resnet18": (resnet18, (3, 32, 32), 8),
    "mlp200": (mlp200, (128,), 64),
}


def our_block(make: Callable[[], nn.Module], data: Any, merge: int, device: torch.device, *, bare: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = make().to(device)
    strategy = fleet.DistributedStrategy()
    if merge > 1:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": merge}
    with contextlib.redirect_stdout(None):
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), strategy)
    x, y = data

    def step() -> None:
        for _ in range(merge):
            optimizer.minimize(F.cross_entropy(model(x), y))

    def bare_step() -> None:
        for _ in range(merge):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return bare_step if bare else step


def ddp_block(make: Callable[[], nn.Module], data: Any, merge: int, device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    model = make().to(device)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = data

    def step() -> None:
        for micro in range(merge):
            with wrapped.no_sync() if micro < merge - 1 else contextlib.nullcontext():
                (F.cross_entropy(wrapped(x), y) / merge).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def paired(ours: Callable[[], None], theirs: Callable[[], None], *, blocks: int, steps: int, device: torch.device) -> Any:
    """Blocks in turn, the order swapped each time, so that drift of a shared machine falls on both."""
    seconds(ours, 2, device), seconds(theirs, 2, device)
    pairs = []
    for block in range(blocks):
        if block % 2:
            a, b = seconds(ours, steps, device), seconds(theirs, steps, device)
        else:
            b, a = seconds(theirs, steps, device), seconds(ours, steps, device)
        pairs.append((a, b))
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]],
        "ours_ms": round(statistics.median(a for a, _ in pairs) * 1e3, 3),
        "ddp_ms": round(statistics.median(b for _, b in pairs) * 1e3, 3),
    }


def added_microseconds(device: torch.device) -> dict[str, float]:
    """One layer, one rank's own world: what the face adds to backward, step, zero_grad of plain torch."""
    from fleetx.dist import world

    here = world.current()
    world._current = None
    world._current = world._survey(world.SoloComm(), here.device, world.role_from_env({}))
    try:
        x, y = torch.randn(8, 16, device=device), torch.randint(0, 4, (8,), device=device)
        plain, ours_model = nn.Linear(16, 4).to(device), nn.Linear(16, 4)
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
        with contextlib.redirect_stdout(None):
            ours_model, ours = fleet.distribute(ours_model, torch.optim.SGD(ours_model.parameters(), lr=1e-3))

        def torch_step() -> None:
            F.cross_entropy(plain(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        def our_step() -> None:
            ours.minimize(F.cross_entropy(ours_model(x), y))

        def bare_step() -> None:
            F.cross_entropy(ours_model(x), y).backward()
            ours.step()
            ours.zero_grad()

        rounds = [[_loop(step, 50, device) * 1e6 for step in (torch_step, our_step, bare_step)] for _ in range(60)]
        return {
            "added_us": round(statistics.median(ours - plain for plain, ours, _ in rounds), 1),
            "bare_added_us": round(statistics.median(bare - plain for plain, _, bare in rounds), 1),
            "plain_us": round(statistics.median(plain for plain, _, _ in rounds), 1),
        }
    finally:
        world._current = here


def _loop(step: Callable[[], None], count: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def join(rank: int, size: int, port: int, args: argparse.Namespace) -> tuple[torch.device, dict[str, Any]]:
    """Be this rank; its device, and the first figures."""
    torch.set_num_threads(1)
    device = torch.device(args.device)
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if args.nccl else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    fleet.init()
    return device, {"ranks": size, "backend": backend}


def start(worker: Callable[..., None], args: argparse.Namespace) -> None:
    """Two gloo ranks, or one of NCCL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = 1 if args.nccl else 2
    mp.spawn(worker, args=(size, port, args), nprocs=size)


def worker(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    device, figures = join(rank, size, port, args)
    for name in args.cases.split(","):
        make, shape, rows = CASES[name]
        torch.manual_seed(rank)
        data = torch.randn(rows, *shape, device=device), torch.randint(0, 10, (rows,), device=device)
        for bare, merge in itertools.product((False, True), (1, MERGE)):
            row = name + ("_bare" if bare else "") + (f"_merge{merge}" if merge > 1 else "")
            ours, theirs = our_block(make, data, merge, device, bare=bare), ddp_block(make, data, merge, device)
            steps = max(1, (args.steps if name == "resnet18" else args.steps * 4) // merge)
            figures[row] = paired(ours, theirs, blocks=args.blocks, steps=steps, device=device)
            if rank == 0:
                print(f"{row:20} {figures[row]}", flush=True)
            del ours, theirs
    if rank == 0:
        figures["one_layer"] = added_microseconds(device)
        print(f"{'one_layer':20} {figures['one_layer']}", flush=True)
        publish(args.name, figures)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4, help="steps in a block of ResNet-18; four times as many of the MLP")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--nccl", action="store_true", help="one rank, NCCL, on a GPU")
    parser.add_argument("--cases", default="resnet18,mlp200")
    parser.add_argument("--name", default=None, help="name of the results file")
    args = parser.parse_args()
    args.device = "cuda" if args.nccl else args.device
    args.name = args.name or ("overhead_nccl" if args.nccl else f"overhead_{args.device}" if args.device != "cpu" else "overhead")
    start(worker, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
