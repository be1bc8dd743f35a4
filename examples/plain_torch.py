"""A small convolutional network learns to read scikit-learn's handwritten digits."""

import argparse

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fleetx import fleet


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = total = 0
    for images, labels in loader:
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
        total += len(labels)
    return correct / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--save", metavar="FILE", help="write the weights here, as safetensors")
    args = parser.parse_args()

    torch.manual_seed(0)
    fleet.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, 32, sampler=fleet.sampler(train_set))
    test_loader = DataLoader(test_set, 256)

    model = build_model().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            loss = criterion(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy:.2%}", flush=True)

    if args.save and fleet.is_first_worker():
        save_file(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
