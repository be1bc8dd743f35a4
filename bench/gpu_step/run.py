"""Is a GPU as busy through fleetx as in a bare loop? Whole steps in turn, ours over the bare loop's, medians of paired blocks.

    python -m bench.gpu_step.run                          on a GPU: every row, each in a process of its own
    python -m bench.gpu_step.run --rows resnet50_eager    some rows, separated by commas
    python -m bench.gpu_step.run --small                  tiny models on any machine, to see that it runs; nothing is kept

ResNet-50 of torchvision: 256 images of 224x224, channels_last, SGD. BERT-large of fleetx.applications: 32 x 512 tokens, fused
AdamW. All in bfloat16 autocast; the bare loop is `loss.backward()`, `step()`, `zero_grad()`; through fleet it is the same loop
with the model and optimizer of `fleet.distribute` and amp, the guards at their defaults. `..._in_place` is `model.compile()`
against `torch.compile(model)`, both through fleet; `..._strategy` is `strategy.compile`; `slow_host` has one core, which a busy
process shares. `lars` is LARS over SGD, both through fleet.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.lib.results import ROOT, publish
from fleetx import fleet
from fleetx.applications.bert import Bert_large
from fleetx.applications.resnet import Resnet50

Step = Callable[[], Tensor]
LIMITS = {"lars": 1.02, "slow_host": 1.05}
LIMIT = 1.01
"""The most that a row may be, where LIMITS says nothing else."""
CLASSES = 1000
TINY_BERT = {"hidden": 32, "layers": 2, "heads": 2, "vocab_size": 211}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- what is trained ----------------------------------------------------------------------------------------------------


class Subject:
    """A model to build any number of times, its data, and its plain optimizer."""

    def __init__(self, *, small: bool) -> None:
        self.small = small

    def model(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: nn.Module) -> Tensor:
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        raise NotImplementedError


class ResNet(Subject):
    rows = 256

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small)
        count, side = (2, 32) if small else (self.rows, 224)
        images = torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(2))
        self.images = images.to(device(), memory_format=torch.channels_last)
        self.labels = torch.randint(0, CLASSES, (count,), device=device())

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.small:
            stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            return nn.Sequential(stem, nn.Linear(8, CLASSES)).to(device())
        try:
            from torchvision.models import resnet50
        except Exception as error:  # beside another build of torch its import fails with a RuntimeError
            print(f"fleetx's Resnet50, since torchvision cannot be imported: {error}", file=sys.stderr)
            return Resnet50(CLASSES).to(device(), memory_format=torch.channels_last)  # type: ignore[call-overload]
        return resnet50(num_classes=CLASSES).to(device(), memory_format=torch.channels_last)

    def loss(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(model(self.images), self.labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


class Bert(Subject):
    """The masked rows are given by position, as our loaders make them: one forward, whose outputs are losses."""

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small)
        rows, length, words = (2, 16, TINY_BERT["vocab_size"]) if small else (32, 512, 30_522)
        generator = torch.Generator().manual_seed(1)
        batch = {
            "input_ids": torch.randint(5, words, (rows, length), generator=generator),
            "token_type_ids": (torch.arange(length) >= length // 2).long().expand(rows, length).contiguous(),
            "next_sentence_label": torch.randint(0, 2, (rows,), generator=generator),
            "mlm_positions": torch.randperm(rows * length, generator=generator)[: rows * length * 15 // 100].sort().values,
        }
        batch["mlm_labels"] = torch.randint(5, words, (len(batch["mlm_positions"]),), generator=generator)
        self.batch = {name: value.to(device()) for name, value in batch.items()}

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Bert_large(**(TINY_BERT if self.small else {})).to(device()).train()

    def loss(self, model: nn.Module) -> Tensor:
        loss: Tensor = model(**self.batch).loss
        return loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device().type == "cuda")


# --- how it is trained --------------------------------------------------------------------------------------------------


def compiled(model: nn.Module, how: str, backend: str) -> nn.Module:
    if how == "wrapped":
        return torch.compile(model, backend=backend)  # type: ignore[return-value]
    if how == "in_place":
        model.compile(backend=backend)
    return model


def bare(subject: Subject, how: str, backend: str) -> Step:
    model = subject.model()
    optimizer = subject.optimizer(model)
    model = compiled(model, how, backend)

    def step() -> Tensor:
        with torch.autocast(device().type, torch.bfloat16):
            loss = subject.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def through_fleet(subject: Subject, how: str, backend: str, **switches: Any) -> Step:
    model = subject.model()
    optimizer: Any = subject.optimizer(model)
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"}, **switches)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        model, optimizer = fleet.distribute(compiled(model, how, backend), optimizer, strategy)

    def step() -> Tensor:
        loss = subject.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def lars(subject: Subject, how: str, backend: str) -> Step:
    return through_fleet(subject, how, backend, lars=True)


def by_strategy(subject: Subject, how: str, backend: str) -> Step:
    if backend != "inductor":
        torch.compiler.set_default_backend(backend)
    return through_fleet(subject, "", backend, compile=True, compile_configs={"scope": how})


ROWS: dict[str, tuple[type[Subject], tuple[Callable[..., Step], str], tuple[Callable[..., Step], str]]] = {
    "resnet50_eager": (ResNet, (through_fleet, ""), (bare, "")),
    "resnet50_compiled": (ResNet, (through_fleet, "wrapped"), (bare, "wrapped")),
    "resnet50_in_place": (ResNet, (through_fleet, "in_place"), (through_fleet, "wrapped")),
    "resnet50_strategy": (ResNet, (by_strategy, "model"), (bare, "wrapped")),
    "resnet50_lars": (ResNet, (lars, ""), (through_fleet, "")),
    "resnet50_lars_compiled": (ResNet, (lars, "wrapped"), (bare, "wrapped")),
    "bert_large_eager": (Bert, (through_fleet, ""), (bare, "")),
    "bert_large_compiled": (Bert, (through_fleet, "wrapped"), (bare, "wrapped")),
    "bert_large_in_place": (Bert, (through_fleet, "in_place"), (through_fleet, "wrapped")),
    "bert_large_strategy": (Bert, (by_strategy, "blocks"), (bare, "wrapped")),
    "bert_large_slow_host": (Bert, (through_fleet, ""), (bare, "")),
}
"""Ours, and what it is compared with."""


# --- time ---------------------------------------------------------------------------------------------------------------


def wait() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def seconds(step: Step, steps: int) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - start) / steps


def paired(ours: Step, theirs: Step, *, blocks: int, steps: int, warm: int) -> dict[str, Any]:
    """Blocks in turn, the order swapped each time, so that a clock that sinks with heat falls on both."""
    begin = time.perf_counter()
    losses = [round(last_loss(step, warm), 4) for step in (ours, theirs)]
    warming = time.perf_counter() - begin
    pairs = []
    for block in range(blocks):
        first, second = (ours, theirs) if block % 2 else (theirs, ours)
        a, b = seconds(first, steps), seconds(second, steps)
        pairs.append((a, b) if block % 2 else (b, a))
    ratios = [mine / other for mine, other in pairs]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]],
        "ours_ms": round(statistics.median(a for a, _ in pairs) * 1e3, 3),
        "theirs_ms": round(statistics.median(b for _, b in pairs) * 1e3, 3),
        "losses_after_warming": losses,
        "warming_s": round(warming, 1),
    }


def last_loss(step: Step, warm: int) -> float:
    """Make the first steps, in which kernels are compiled and chosen; return the last loss."""
    for _ in range(warm - 1):
        step()
    return float(step().item())


@contextlib.contextmanager
def one_busy_core() -> Iterator[None]:
    """Keep this process, and one that never rests, on the same core."""
    before = os.sched_getaffinity(0)
    core = min(before)
    busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})
        yield
    finally:
        busy.kill()
        busy.wait()
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    make, (ours, our_form), (theirs, their_form) = ROWS[name]
    subject = make(small=args.small)
    backend = "aot_eager" if args.small else "inductor"
    steps = ours(subject, our_form, backend), theirs(subject, their_form, backend)
    timing = {"blocks": args.blocks, "steps": args.steps, "warm": args.warm}
    if not name.endswith("slow_host"):
        return paired(*steps, **timing)
    seconds(steps[0], args.warm), seconds(steps[1], args.warm)
    with one_busy_core():
        return paired(*steps, **timing)


def limit(name: str) -> float:
    return next((value for part, value in LIMITS.items() if part in name and not name.endswith("compiled")), LIMIT)


# --- all of it ----------------------------------------------------------------------------------------------------------


def in_own_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one row: what a model leaves behind in the compiler or the allocator falls on no other."""
    words = ["--row", name, "--blocks", str(args.blocks), "--steps", str(args.steps), "--warm", str(args.warm)]
    words += ["--small"] * args.small
    command = [sys.executable, "-m", "bench.gpu_step.run", *words]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {args.limit} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:300]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="which, separated by commas (default: all)")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="tiny models, on any machine; no results file")
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    parser.add_argument("--warm", type=int, default=5, help="steps before the first block")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for one row")
    parser.add_argument("--name", default="gpu_step", help="name of the results file")
    args = parser.parse_args()
    if not (args.small or torch.cuda.is_available()):
        parser.error("this bench needs a GPU; --small runs tiny models without one")
    if args.row:
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        print(json.dumps(measure(args.row, args)))
        return 0
    unknown = set(args.rows.split(",")) - ROWS.keys()
    if unknown:
        parser.error(f"--rows has {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    figures: dict[str, Any] = {}
    for name in args.rows.split(","):
        row = in_own_process(name, args)
        figures[name] = row | {"limit": limit(name), "kept": row.get("ratio", float("inf")) <= limit(name)}
        print(f"{name:24} {figures[name]}", flush=True)
    kept = all(row["kept"] for row in figures.values())
    if args.small:
        print(json.dumps({"bench": f"{args.name}_small", **figures}))
        return int(any("error" in row for row in figures.values()))
    publish(args.name, figures | {"kept": kept})
    return 0


if __name__ == "__main__":
    sys.exit(main())
