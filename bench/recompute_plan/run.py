"""Budgets for recompute: are they kept, how good are the predictions, and what does a plan cost beside computing all again?

    python -m bench.recompute_plan.run            on a GPU if there is one, else on the CPU with small nets
    python -m bench.recompute_plan.run --quick    one net, two budgets: to see that it runs; nothing is kept

For each net: the peak of a plain step (A); of one with every unit computed again, by name (B); then budgets between them, and
below B. One after another, each gone before the next: an allocator counts all that is there. The plain step is timed first and
last, so that a clock that sinks with heat falls on both. On a CPU bytes are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fleetx as X
from bench.lib.results import publish
from fleetx import fleet
from fleetx.errors import ConfigError

ON_GPU = torch.cuda.is_available()
SHARES = (0.8, 0.6, 0.4)
"""Budgets, from the smallest (0) to that of a plain step (1)."""
STEPS = 9 if ON_GPU else 5
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    strategy: dict[str, Any]


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.downs = nn.ModuleList([_block(3, width), _block(width, 2 * width), _block(2 * width, 4 * width)])
        self.ups = nn.ModuleList([_block(6 * width, 2 * width), _block(3 * width, width)])
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs[:-1]:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.downs[-1](x)
        for up, skip in zip(self.ups, reversed(skips), strict=True):
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        out: Tensor = self.head(x).mean((2, 3))
        return out


def _block(inputs: int, outputs: int) -> nn.Sequential:
    first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.body = nn.Transformer(width, 4, layers, layers, 4 * width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x, x.flip(1)).mean(1))
        return out


def _images(count: int, size: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(count, 3, size, size), torch.randint(0, 10, (count,)))


def _sequences(count: int, length: int, width: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(count, length, width), torch.randint(0, 10, (count,)))


def nets() -> dict[str, Net]:
    amp = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
    if ON_GPU:
        return {
            "resnet50": Net(lambda: X.applications.Resnet50(num_classes=10), _images(128, 224), amp),
            "vgg16": Net(lambda: X.applications.VGG16(num_classes=10), _images(64, 224), amp),
            "u-net": Net(lambda: UNet(64), _images(64, 128), {}),
            "transformer": Net(lambda: Transformer(512, 6), _sequences(64, 256, 512), amp),
        }
    return {
        "resnet20": Net(lambda: X.applications.Resnet20(num_classes=10), _images(16, 32), {}),
        "u-net": Net(lambda: UNet(8), _images(8, 32), {}),
        "transformer": Net(lambda: Transformer(64, 4), _sequences(8, 64, 64), {}),
        "transformer, bf16": Net(lambda: Transformer(64, 4), _sequences(8, 64, 64), amp),
    }


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass
class Pair:
    model: nn.Module
    optimizer: Any
    batch: Batch
    planning_s: float

    def step(self) -> float:
        begun = time.perf_counter()
        self.optimizer.minimize(loss_fn(self.model, self.batch))
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter() - begun


def pair(net: Net, recompute: dict[str, Any]) -> Pair:
    torch.manual_seed(0)
    model, batch = net.build(), net.batch()
    strategy = fleet.DistributedStrategy(recompute=True, recompute_configs=recompute, **net.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    begun = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        model, ours = fleet.distribute(model, optimizer, strategy, sample=batch, loss_fn=loss_fn)
    planning = time.perf_counter() - begun
    return Pair(model, ours, tuple(tensor.to(fleet.device()) for tensor in batch), planning)  # type: ignore[arg-type]


def smallest(net: Net) -> int:
    """What the error says that a budget must be, at least."""
    try:
        pair(net, {"budget": 1})
    except ConfigError as error:
        return int(str(error).split('"budget": ')[-1].split(",")[0])
    raise AssertionError("a budget of one byte was kept to")


def measure(name: str, net: Net, shares: Sequence[float]) -> list[dict[str, Any]]:
    first = row_of(name, net, {"budget": 10**15}, "plain")
    most, least = first["real_bytes"], smallest(net)
    cleared()
    budgets = [int(least + share * (most - least)) for share in shares] + [int(1.01 * least)]
    rows = [row_of(name, net, {}, "all units, by name"), *(row_of(name, net, {"budget": budget}, "budget") for budget in budgets)]
    last = row_of(name, net, {"budget": 10**15}, "plain")
    plain_ms = (first["step_ms"] + last["step_ms"]) / 2
    for row in [first, *rows]:
        if "step_ms" in row:
            row["of_plain_speed"] = plain_ms / row["step_ms"]
        print(told(row), flush=True)
    return [first, *rows]


def row_of(name: str, net: Net, recompute: dict[str, Any], kind: str) -> dict[str, Any]:
    """One pair: made, timed, and gone."""
    row: dict[str, Any] = {"net": name, "plan": kind}
    try:
        one = pair(net, recompute)
    except ConfigError as error:
        return row | {"refused": str(error), "budget_bytes": recompute["budget"]}
    row |= {"planning_s": one.planning_s, "step_ms": 1e3 * median([one.step() for _ in range(1 + STEPS)][1:])}
    plan = one.optimizer.memory_plan
    if plan is not None:
        row |= {
            "budget_bytes": plan.budget,
            "predicted_bytes": plan.predicted_bytes,
            "real_bytes": plan.real_bytes,
            "reserved_bytes": plan.reserved_bytes,
            "off_percent": 100 * (plan.predicted_bytes / plan.real_bytes - 1),
            "recomputed": len(plan.recomputed),
            "units": len(plan.units),
            "segments": len(plan.segments),
            "predicted_added_ms": 1e3 * plan.seconds_added,
        }
    del one
    cleared()
    return row


def cleared() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def told(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"{row['net']:18} budget {row['budget_bytes'] / 1e6:.1f} MB: {row['refused']}"
    if "budget_bytes" not in row:
        return f"{row['net']:18} {row['plan']:20} {row['step_ms']:8.1f} ms  {row['of_plain_speed']:.2f} of plain"
    budget = "" if row["plan"] == "plain" else f"{row['budget_bytes'] / 1e6:.1f} MB"
    counts = f"{row['recomputed']} of {row['units']}" + (f", {row['segments']} segments" if row["segments"] else "")
    return (
        f"{row['net']:18} {row['plan']:7}{budget:>13} {row['step_ms']:8.1f} ms  {row['of_plain_speed']:.2f} of plain   "
        f"predicted {row['predicted_bytes'] / 1e6:.1f} MB, real {row['real_bytes'] / 1e6:.1f} ({row['off_percent']:+.1f} %), "
        f"reserved {row['reserved_bytes'] / 1e6:.1f}   {counts}   planned in {row['planning_s']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one net, two budgets; nothing is kept (default: off)")
    flags = parser.parse_args()
    fleet.init()
    chosen = dict(list(nets().items())[:1]) if flags.quick else nets()
    rows = [row for name, net in chosen.items() for row in measure(name, net, SHARES[:1] if flags.quick else SHARES)]
    planned = [row for row in rows if row["plan"] == "budget" and "refused" not in row]
    figures = {
        "rows": rows,
        "worst_off_percent": max(abs(row["off_percent"]) for row in planned),
        "refused": sum("refused" in row for row in rows),
        "over_budget": sum(row["reserved_bytes"] > row["budget_bytes"] for row in planned),
    }
    if not flags.quick:
        publish("recompute_plan" if ON_GPU else "recompute_plan_cpu", figures)


if __name__ == "__main__":
    main()
