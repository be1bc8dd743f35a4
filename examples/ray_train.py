"""Ray Train's workers learn to read scikit-learn's handwritten digits, and average every 4 updates.

python examples/ray_train.py

Against a plain loop in Ray Train only the lines marked with # fleetx are new; `prepare_model` is not called.
"""

import argparse
import os
import tempfile

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fleetx import fleet  # fleetx


def load_data():
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    return TensorDataset(images[train], labels[train]), (images[test], labels[test])


def train_loop_per_worker(config):
    fleet.init()  # fleetx: adopts the process group that Ray has made
    train_set, (images, labels) = load_data()
    loader = DataLoader(train_set, 32, sampler=fleet.sampler(train_set))  # fleetx
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = fleet.DistributedStrategy(localsgd=True)  # fleetx
    strategy.localsgd_configs = {"k_steps": 4}  # fleetx
    model, optimizer = fleet.distribute(model, optimizer, strategy)  # fleetx
    everything = {"model": model, "optimizer": optimizer, "sampler": loader.sampler}

    found = ray.train.get_checkpoint()  # after a failure, the last checkpoint reported
    if found is not None:
        with found.as_directory() as path:
            fleet.load_checkpoint(path, **everything)  # fleetx
    for epoch in range(loader.sampler.epoch, config["epochs"]):
        for x, y in loader:
            optimizer.minimize(nn.functional.cross_entropy(model(x), y))  # fleetx
        with torch.no_grad(), optimizer.averaged():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        fleet.save_checkpoint(config["folder"], step=epoch + 1, **everything)  # fleetx: every rank, into a shared folder
        mine = Checkpoint.from_directory(config["folder"]) if fleet.is_first_worker() else None
        ray.train.report({"accuracy": accuracy, "epoch": epoch + 1}, checkpoint=mine)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=args.workers, include_dashboard=False, object_store_memory=80 * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_loop_per_worker,
            train_loop_config={"epochs": args.epochs, "folder": f"{folder}/fleet"},
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(storage_path=f"{folder}/ray", name="digits"),
        )
        metrics = trainer.fit().metrics
    ray.shutdown()
    print(f"accuracy {metrics['accuracy']:.2%} after epoch {metrics['epoch']}", flush=True)


if __name__ == "__main__":
    main()
