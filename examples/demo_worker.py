"""Run one rank of the demo: train on the digits under a strategy, with a monitor that shows and logs the progress."""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from fleetx import fleet
from plain_torch import build_model, evaluate, load_data

BATCH = 32  # samples of one micro-step on one rank


def train(strategy: fleet.DistributedStrategy, lr: float, epochs: int, run: Path) -> None:
    train_set, test_set = load_data()
    loader = DataLoader(train_set, BATCH, sampler=fleet.sampler(train_set))
    test_loader = DataLoader(test_set, 256)
    model, criterion, device = build_model(), nn.CrossEntropyLoss(), fleet.device()
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr, momentum=0.9), strategy)
    updates = math.ceil(epochs * len(loader) / strategy.gradient_merge_configs["k_steps"])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, updates)

    with fleet.Monitor(run, total_steps=updates, tensorboard=False) as monitor:
        for epoch in range(1, epochs + 1):
            model.train()
            for images, labels in loader:
                report = optimizer.minimize(criterion(model(images.to(device)), labels.to(device)))
                if report.due:
                    scheduler.step()
                monitor.log(report, samples=len(labels))
            if epoch == epochs:
                monitor.log(optimizer.flush())  # the window that the last micro-steps left open, if any
            monitor.log(acc=evaluate(model, test_loader, device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", metavar="FILE", help="a strategy as JSON or YAML; plain without it")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--run", type=Path, default=Path("demo-run/digits"), help="folder of the run")
    args = parser.parse_args()

    torch.manual_seed(0)
    fleet.init()
    strategy = fleet.DistributedStrategy.load(args.strategy) if args.strategy else fleet.DistributedStrategy()
    train(strategy, args.lr, args.epochs, args.run)


if __name__ == "__main__":
    main()
