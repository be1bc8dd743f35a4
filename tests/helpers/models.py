"""Small models for tests, and the data they train on."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def cnn() -> nn.Sequential:
    """No biases before BatchNorm: their gradient is rounding noise, which Adam would blow up to full steps."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def batch(index: int, rows: int = 8, shape: tuple[int, ...] = (8,), dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A batch that depends on its index alone."""
    generator = torch.Generator().manual_seed(1000 + index)
    x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 4, (rows,), generator=generator)
    return x, y


def learnable_images(index: int) -> tuple[Tensor, Tensor]:
    """Images whose brightness tells their class."""
    x, y = batch(index, rows=16, shape=(1, 6, 6))
    return x * 0.3 + y.view(-1, 1, 1, 1).float(), y


def flat_state(model: nn.Module) -> Tensor:
    """All parameters and buffers in one float64 row."""
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])
