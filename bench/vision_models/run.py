"""Do our image models train as fast as torchvision's? One GPU, alternating blocks of steps, the median of paired ratios.

    python -m bench.vision_models.run            Resnet50 at batch 256 and 128, VGG16 at batch 128, of 224x224
    python -m bench.vision_models.run --smoke    a few small steps on any machine, to see that the bench runs; nothing is kept

A step is forward, loss, backward and SGD with momentum, under bfloat16 autocast, weights and images in channels_last. Both
models begin with the same seed and data; `first_losses` are ours, torchvision's, and that of a second one of torchvision's.
`speed_ratio` is our images per second over torchvision's: at least 0.99 is wanted. `noise_ratio` is the same measure of
torchvision's two against each other. Where torchvision cannot be imported ours runs against itself, and the figures say so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.lib.results import publish, surroundings
from fleetx.applications.resnet import Resnet50
from fleetx.applications.vgg import VGG16

WANTED = 0.99
CLASSES = 1000


@dataclass(frozen=True)
class Case:
    make: Callable[..., nn.Module]
    public_name: str
    batch: int
    image_size: int
    pairs: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.public_name}_batch{self.batch}_{self.image_size}"


FULL = [
    Case(Resnet50, "resnet50", 256, 224, pairs=16, steps=4),
    Case(Resnet50, "resnet50", 128, 224, pairs=16, steps=8),
    Case(VGG16, "vgg16", 128, 224, pairs=10, steps=4),
]
SMOKE = [Case(Resnet50, "resnet50", 2, 64, pairs=2, steps=1)]


@dataclass
class Trainee:
    """A model in training, and how to run one step of it."""

    step: Callable[[], Tensor]
    batch: int


def public_models() -> tuple[Any, str]:
    """torchvision's models, and what the figures say we ran against."""
    try:
        return importlib.import_module("torchvision.models"), "torchvision " + importlib.import_module("torchvision").__version__
    except Exception as error:  # beside a CPU build of torch its import fails with a RuntimeError
        return None, f"itself: torchvision cannot be imported ({type(error).__name__})"


def trainee(make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], *, own_loss: bool) -> Trainee:
    images, labels = data
    torch.manual_seed(0)
    model = make().to(images.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if images.is_cuda else contextlib.nullcontext():
            loss = model.loss(data) if own_loss else F.cross_entropy(model(images), labels)  # type: ignore[operator]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainee(step, len(labels))


def seconds(subject: Trainee, steps: int) -> float:
    """Of one step, between two events on the device."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(steps):
            subject.step()
        return (time.perf_counter() - start) / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        subject.step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / steps


def speed_ratios(ours: Trainee, theirs: Trainee, *, pairs: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Pairs of blocks, the order swapped each time, so that a clock that sinks with heat falls on both."""
    a: list[float] = []
    b: list[float] = []
    for pair in range(pairs):
        for side in ("ab", "ba")[pair % 2]:
            (a if side == "a" else b).append(seconds(ours if side == "a" else theirs, steps))
    return [y / x for x, y in zip(a, b, strict=True)], a, b


def first_loss(subject: Trainee) -> Tensor:
    torch.manual_seed(1)  # the dropout of VGG16
    return subject.step()


def peak_gib(subject: Trainee) -> float | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    subject.step()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)


def measure(case: Case, models: Any, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(case.batch, 3, case.image_size, case.image_size, generator=generator)
    labels = torch.randint(0, CLASSES, (case.batch,), generator=generator).to(device)
    data = images.to(device, memory_format=torch.channels_last), labels

    def own() -> nn.Module:
        return case.make(CLASSES, image_size=case.image_size, channels_last=True)

    public = own if models is None else lambda: getattr(models, case.public_name)(num_classes=CLASSES)
    ours = trainee(own, data, own_loss=True)
    theirs, twin = (trainee(public, data, own_loss=False) for _ in range(2))
    losses = [first_loss(subject) for subject in (ours, theirs, twin)]
    for subject in (ours, theirs, twin):
        seconds(subject, 2)  # cuDNN has chosen its algorithms now, and the allocator has its blocks
    ratios, a, b = speed_ratios(ours, theirs, pairs=case.pairs, steps=case.steps)
    noise, _, _ = speed_ratios(twin, theirs, pairs=max(2, case.pairs // 4), steps=case.steps)
    return {
        "speed_ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]],
        "noise_ratio": round(statistics.median(noise), 4),
        "ours_images_s": round(case.batch / statistics.median(a), 1),
        "theirs_images_s": round(case.batch / statistics.median(b), 1),
        "ours_step_gib": peak_gib(ours),
        "theirs_step_gib": peak_gib(theirs),
        "first_losses": [round(loss.item(), 6) for loss in losses],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small and quick, on any machine; no results file")
    parser.add_argument("--name", default="vision_models", help="name of the results file")
    args = parser.parse_args()
    if not (args.smoke or torch.cuda.is_available()):
        parser.error("this bench needs a GPU; --smoke runs a few small steps without one")
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models, against = public_models()
    figures: dict[str, Any] = {"against": against, "dtype": "bfloat16 autocast" if device.type == "cuda" else "float32"}
    begin = time.perf_counter()
    for case in SMOKE if args.smoke else FULL:
        figures[case.name] = measure(case, models, device)
        print(f"{case.name:24} {figures[case.name]}", flush=True)
    rows = [row for row in figures.values() if isinstance(row, dict)]
    figures["wanted"] = WANTED
    figures["met"] = models is not None and all(row["speed_ratio"] >= WANTED for row in rows)
    figures["seconds"] = round(time.perf_counter() - begin, 1)
    if args.smoke:
        print(json.dumps({"bench": f"{args.name}_smoke", **surroundings(), **figures}))
    else:
        publish(args.name, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
