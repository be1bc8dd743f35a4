"""An Accelerate loop trained by a strategy: LARS, and weights averaged every 4 updates instead of gradients at each.

python accelerate_loop.py    or    fleetrun --nproc_per_node 2 accelerate_loop.py    or    torchrun, accelerate launch
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from fleetx import fleet
from fleetx.integrations.accelerate import Accelerator


def load_data():
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    return random_split(data, [0.75, 0.25], torch.Generator().manual_seed(0))


def main():
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(lars=True, localsgd=True)
    strategy.lars_configs = {"lars_coeff": 0.02}
    strategy.localsgd_configs = {"k_steps": 4}
    accelerator = Accelerator(strategy=strategy)

    train_set, test_set = load_data()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    train_loader, test_loader = DataLoader(train_set, 32, shuffle=True), DataLoader(test_set, 128)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8 * len(train_loader))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    for _ in range(8):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    model.eval()
    with optimizer.averaged(), torch.no_grad():
        pairs = [accelerator.gather_for_metrics((model(x).argmax(1), y)) for x, y in test_loader]
    correct = sum(int((guessed == label).sum()) for guessed, label in pairs)
    accelerator.print(f"{accelerator.num_processes} processes: test accuracy {100 * correct / len(test_set):.1f}%")
    accelerator.end_training()


if __name__ == "__main__":
    main()
