"""Train on the digits with exact resume: kill a rank, or the whole job, and start again; it ends with the same bits.

fleetrun --max_restart 3 examples/resume.py      # a rank that dies is restarted with the others, from the last checkpoint
fleetrun examples/resume.py                      # Ctrl-C it, or send it SIGTERM, and run the same line again
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader

from fleetx import fleet
from plain_torch import build_model, evaluate, load_data


def fingerprint(model: nn.Module) -> str:
    """Hash the weights' bits: equal for a run that was killed and one that was not."""
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(tensor.cpu().numpy().tobytes())
    return hasher.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoints", default="checkpoints", help="folder; every worker must see the same one")
    parser.add_argument("--save_every", type=int, default=10, help="updates between two checkpoints")
    parser.add_argument("--model", default="model.safetensors", help="the trained model")
    args = parser.parse_args()

    fleet.init()
    torch.manual_seed(fleet.worker_index())
    train_set, test_set = load_data()
    sampler = fleet.sampler(train_set)
    loader = DataLoader(train_set, 32, sampler=sampler)
    test_loader = DataLoader(test_set, 256)
    model, criterion, device = build_model(), nn.CrossEntropyLoss(), fleet.device()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 60)
    everything = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}

    found = fleet.load_checkpoint(args.checkpoints, **everything)
    step = found.step if found else 0
    if fleet.is_first_worker():
        print(f"continuing after {step} of {args.epochs * len(loader)} batches" if found else "starting from scratch", flush=True)
    for epoch in range(sampler.epoch, args.epochs):
        model.train()
        for images, labels in loader:
            report = optimizer.minimize(criterion(model(images.to(device)), labels.to(device)))
            if report.due:
                scheduler.step()
            step += 1
            stop = fleet.should_stop()  # SIGTERM or SIGUSR1: the same answer on every worker
            if stop or step % args.save_every == 0:
                fleet.save_checkpoint(args.checkpoints, step=step, async_save=not stop, **everything)
            if stop:
                return
        accuracy = evaluate(model, test_loader, device)
        if fleet.is_first_worker():
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}", flush=True)
    fleet.save_model(args.model, model, optimizer)
    if fleet.is_first_worker():
        print(f"weights {fingerprint(model)} in {args.model}", flush=True)


if __name__ == "__main__":
    main()
