"""One rank of the demo: train on the digits under a strategy, show how it goes, note every epoch in metrics.jsonl."""

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.utils.data import DataLoader

from fleetx import fleet
from plain_torch import build_model, evaluate, load_data

BATCH = 32  # of one micro-step on one rank


@dataclass
class Tally:
    """What the run has done so far."""

    epoch: int = 0
    samples: int = 0  # by all ranks
    updates: int = 0
    bytes_sent: int = 0  # by this rank
    loss: float = math.log(10)  # smoothed over ten updates, from that of a guess
    accuracy: float = 0.0
    seconds: float = 0.0

    def count(self, report, samples: int) -> None:
        self.samples += samples
        self.bytes_sent += report.bytes_sent
        if report.due:
            self.updates += 1
            self.loss += (report.loss - self.loss) / 10

    def describe(self) -> str:
        speed, megabytes = self.samples / max(self.seconds, 1e-3), self.bytes_sent / 1e6
        return f"loss {self.loss:.3f}  acc {self.accuracy:5.1%}  {speed:5,.0f} samples/s  {megabytes:5.2f} MB sent"


@contextlib.contextmanager
def progress_bar(name: str, total: int) -> Iterator[Callable[[Tally], None] | None]:
    """A live bar on the terminal that fleetrun names to rank 0; None where there is no terminal."""
    terminal = os.environ.get("FLEETX_TTY")
    if terminal is None:
        yield None
        return
    time.sleep(0.3)  # fleetrun copies our log to the same terminal every 0.1 s: let the overview pass before drawing below it
    with open(os.open(terminal, os.O_RDWR | os.O_NOCTTY), "w", encoding="utf-8") as screen:
        console = Console(file=screen, force_terminal=True, width=os.get_terminal_size(screen.fileno()).columns)
        columns = (TextColumn(name), BarColumn(None), TextColumn("{task.description}  eta"), TimeRemainingColumn(compact=True))
        with Progress(*columns, console=console, expand=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda tally: bar.update(task, completed=tally.samples, description=tally.describe())


def train(args: argparse.Namespace, note: Callable[[Tally], None]) -> None:
    train_set, test_set = load_data()
    loader = DataLoader(train_set, BATCH, sampler=fleet.sampler(train_set))
    test_loader = DataLoader(test_set, 256, sampler=fleet.sampler(test_set, shuffle=False))

    strategy = fleet.DistributedStrategy.load(args.strategy) if args.strategy else fleet.DistributedStrategy()
    model, criterion = build_model(), nn.CrossEntropyLoss()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), args.lr, momentum=0.9), strategy)
    updates = math.ceil(args.epochs * len(loader) / strategy.gradient_merge_configs["k_steps"])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, updates)

    tally, device, ranks = Tally(), fleet.device(), fleet.worker_num()
    with progress_bar(args.name, args.epochs * len(loader.sampler) * ranks) as show:
        start = time.perf_counter()
        for tally.epoch in range(1, args.epochs + 1):
            model.train()
            for images, labels in loader:
                report = optimizer.minimize(criterion(model(images.to(device)), labels.to(device)))
                if report.due:
                    scheduler.step()
                tally.count(report, samples=len(labels) * ranks)
                tally.seconds = time.perf_counter() - start
                if show:
                    show(tally)
            if tally.epoch == args.epochs:
                tally.count(optimizer.flush(), samples=0)  # the window that the last micro-steps left open, if any
            tally.accuracy = evaluate(model, test_loader, device)
            note(tally)
            if show:
                show(tally)
            else:
                print(f"{args.name} epoch {tally.epoch:2}/{args.epochs}  {tally.describe()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="digits")
    parser.add_argument("--strategy", metavar="FILE", help="a strategy as JSON or YAML; plain without it")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("demo-run"), help="folder of metrics.jsonl")
    args = parser.parse_args()

    torch.manual_seed(0)
    fleet.init()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "metrics.jsonl" if fleet.is_first_worker() else os.devnull
    with open(path, "w", encoding="utf-8") as metrics:
        train(args, lambda tally: print(json.dumps(asdict(tally)), file=metrics, flush=True))


if __name__ == "__main__":
    main()
