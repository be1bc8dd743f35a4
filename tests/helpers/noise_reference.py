"""A model whose gradients are the data, and the noise scale of such data in numpy, written apart from the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetx import fleet

FEATURES = 4096
SIGNAL_SQ, TRACE = 512.0, 4096.0
"""Each sample is G plus noise of unit variance: tr(C) = 4096, |G|^2 = 512, and the noise scale is 8 samples."""


class Slopes(nn.Module):
    """loss = mean over samples of <weights, sample>: the gradient is the mean sample, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.zeros(96, 1))
        self.body = nn.Parameter(torch.zeros(FEATURES - 96, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :96] @ self.head + x[:, 96:] @ self.body).mean()


def samples(index: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(77 + index)
    noise = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    return (noise + (SIGNAL_SQ / FEATURES) ** 0.5).float()


def distributed(strategy: fleet.DistributedStrategy) -> tuple[Slopes, Any]:
    model = Slopes()
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), strategy)


def strategy(every: int = 1, *, merged: int = 1, **rest: Any) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy(noise_scale_steps=every, fuse_grad_size_in_MB=0.001, **rest)
    if merged > 1:
        made.gradient_merge, made.gradient_merge_configs["k_steps"] = True, merged
    return made


def reference(windows: Sequence[Any], *, weighted: bool = False, decay: float = 0.99) -> float:
    """`windows`: of measured updates, [rank][micro-step] -> samples of that micro-batch. Running means by hand."""
    sums = np.zeros(2)
    for ranks in windows:
        batches = [[np.asarray(batch, dtype=np.float64) for batch in micro] for micro in ranks]
        first = [micro[0] for micro in batches if len(micro[0])]
        everything = [batch for micro in batches for batch in micro if len(batch)]
        if weighted:
            counts = np.array([len(batch) for batch in first])
            small_sq = np.average([np.sum(b.mean(0) ** 2) for b in first], weights=counts)
            small, large = counts.mean(), float(sum(len(b) for b in everything))
            gradient = np.concatenate(everything).mean(0)
        else:
            small_sq = np.mean([np.sum(b.mean(0) ** 2) for b in first])
            small, large = 1.0, float(len(everything))
            gradient = np.mean([b.mean(0) for b in everything], axis=0)
        large_sq = np.sum(gradient**2)
        trace = (small_sq - large_sq) / (1 / small - 1 / large)
        signal = (large * large_sq - small * small_sq) / (large - small)
        sums = decay * sums + (1 - decay) * np.array([trace, signal])
    return float(sums[0] / sums[1])
