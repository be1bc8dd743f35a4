"""ResNet-9: the small residual network of the DAWNBench entries for CIFAR-10, 6.6 million parameters at width 64.

    start 64 | narrow 128, half | residual 128 | narrow 256, half | narrow 512, half | residual 512 | pool | linear, x 0.125

Every convolution is followed by BatchNorm and an activation. Pooling stands before BatchNorm: the maximum commutes with ReLU
and with a positive scale, and the two work on a quarter of the pixels. Options for learning in few updates:

    whiten          in front stands a fixed convolution that whitens patches of 2x2 or 3x3 pixels, with an activation
    dirac           a convolution hands its inputs on unchanged in its first outputs, until it has learnt better
    frozen_scale    BatchNorm's scales stay 1: the convolutions before them can do without
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.lib.whitening import Whitening

LOGIT_SCALE = 0.125
CELU_ALPHA = 0.075
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "celu": lambda: nn.CELU(CELU_ALPHA), "gelu": nn.GELU}
AFTER_WHITENING = {2: 3, 3: 1}  # patch: kernel of the convolution after it


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, activation: str, halve: bool = False, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.activate = ACTIVATIONS[activation]()
        self.halve = halve

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.activate(self.norm(F.max_pool2d(x, 2) if self.halve else x))


class Residual(nn.Module):
    def __init__(self, width: int, *, activation: str) -> None:
        super().__init__()
        self.first = Layer(width, width, activation=activation)
        self.second = Layer(width, width, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


def first_layers(width: int, *, whiten: int, activation: str) -> nn.Module:
    if not whiten:
        return Layer(3, width, activation=activation)
    fixed = Whitening(whiten)
    learnt = Layer(fixed.outputs, width, activation=activation, kernel=AFTER_WHITENING[whiten])
    return nn.Sequential(fixed, ACTIVATIONS[activation](), learnt)


@torch.no_grad()
def start_as_identity(model: nn.Module) -> None:
    """Of every convolution with at least as many outputs as inputs, the first outputs become its inputs."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels <= module.out_channels:
            nn.init.dirac_(module.weight[: module.in_channels])


def freeze_scales(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.requires_grad_(False)


class ResNet9(nn.Module):
    """Logits [N, classes] of images [N, 3, 32, 32]."""

    def __init__(
        self,
        classes: int = 10,
        *,
        width: int = 64,
        zero_init_last_gamma: bool = False,
        whiten: int = 0,
        activation: str = "relu",
        dirac: bool = False,
        frozen_scale: bool = False,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            first_layers(width, whiten=whiten, activation=activation),
            Layer(width, 2 * width, activation=activation, halve=True),
            Residual(2 * width, activation=activation),
            Layer(2 * width, 4 * width, activation=activation, halve=True),
            Layer(4 * width, 8 * width, activation=activation, halve=True),
            Residual(8 * width, activation=activation),
        )
        self.head = nn.Linear(8 * width, classes, bias=False)
        if zero_init_last_gamma:
            for module in self.modules():
                if isinstance(module, Residual):
                    nn.init.zeros_(module.second.norm.weight)
        if dirac:
            start_as_identity(self)
        if frozen_scale:
            freeze_scales(self)

    def fit_whitening(self, images: Tensor) -> None:
        """To the bytes [N, 32, 32, 3] that the network is to be trained on."""
        for module in self.modules():
            if isinstance(module, Whitening):
                module.fit(images)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images)
        return self.head(F.max_pool2d(features, features.shape[-1]).flatten(1)) * LOGIT_SCALE
