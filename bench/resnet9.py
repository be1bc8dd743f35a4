"""ResNet-9: the small residual network of the DAWNBench entries for CIFAR-10, 6.6 million parameters at width 64.

    start 64 | narrow 128, half | residual 128 | narrow 256, half | narrow 512, half | residual 512 | pool | linear, x 0.125

Every convolution is followed by BatchNorm and ReLU. Pooling stands before BatchNorm: the maximum commutes with ReLU and with a
positive scale, and the two work on a quarter of the pixels.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

LOGIT_SCALE = 0.125


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, halve: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.halve = halve

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return F.relu(self.norm(F.max_pool2d(x, 2) if self.halve else x))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Layer(width, width)
        self.second = Layer(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


class ResNet9(nn.Module):
    """Logits [N, classes] of images [N, 3, 32, 32]."""

    def __init__(self, classes: int = 10, *, width: int = 64, zero_init_last_gamma: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Layer(3, width),
            Layer(width, 2 * width, halve=True),
            Residual(2 * width),
            Layer(2 * width, 4 * width, halve=True),
            Layer(4 * width, 8 * width, halve=True),
            Residual(8 * width),
        )
        self.head = nn.Linear(8 * width, classes, bias=False)
        if zero_init_last_gamma:
            for module in self.modules():
                if isinstance(module, Residual):
                    nn.init.zeros_(module.second.norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images)
        return self.head(F.max_pool2d(features, features.shape[-1]).flatten(1)) * LOGIT_SCALE
