"""Hugging Face's Trainer trained by a strategy: large batches by LARS, two micro-batches an update, a 16-bit wire.

python hf_trainer.py    or    fleetrun --nproc_per_node 2 hf_trainer.py    or    torchrun
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from fleetx import fleet
from fleetx.integrations.transformers import FleetTrainer


class Digits(Dataset):
    def __init__(self, rows):
        digits = load_digits()
        self.images = torch.tensor(digits.data[rows], dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target[rows])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """Any transformers model will do; this one needs no download."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images, labels):
        scores = self.net(images)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def accuracy(predictions):
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def main():
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(lars=True, gradient_merge=True, bf16_allreduce=True)
    strategy.lars_configs = {"lars_coeff": 0.02}
    strategy.gradient_merge_configs = {"k_steps": 2}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=not torch.cuda.is_available(), num_train_epochs=12, per_device_train_batch_size=32,
            learning_rate=0.5, optim="sgd", optim_args="momentum=0.9", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = FleetTrainer(
            model=Classifier(), args=arguments, train_dataset=Digits(slice(0, 1347)), eval_dataset=Digits(slice(1347, None)),
            compute_metrics=accuracy, fleet_strategy=strategy,
        )  # fmt: skip
        trainer.train()
        found = trainer.evaluate()["eval_accuracy"]
        if trainer.is_world_process_zero():
            print(f"{arguments.world_size} processes: test accuracy {100 * found:.1f}%")


if __name__ == "__main__":
    main()
