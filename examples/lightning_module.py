"""A LightningModule learns to read scikit-learn's handwritten digits on two processes that average every 4 updates.

python examples/lightning_module.py           Lightning starts the second process
fleetrun --nproc_per_node 2 examples/lightning_module.py

Against plain Lightning only the lines marked with # fleetx are new.
"""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fleetx import fleet  # fleetx
from fleetx.integrations.lightning import FleetStrategy  # fleetx


class Reader(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()

    pl.seed_everything(0)
    train_set, test_set = load_data()
    strategy = fleet.DistributedStrategy(localsgd=True)  # fleetx
    strategy.localsgd_configs = {"k_steps": 4}  # fleetx
    trainer = pl.Trainer(
        strategy=FleetStrategy(strategy),  # fleetx
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Reader(), DataLoader(train_set, 32, shuffle=True), DataLoader(test_set, 256))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.2%} after {trainer.global_step} updates", flush=True)


if __name__ == "__main__":
    main()
