"""Define ResNets (He et al. 2015, arXiv 1512.03385): Resnet50 for photographs, Resnet20 for images of 32x32.

    conv1 bn1 relu maxpool | layer1 ... layer4, each a row of blocks | avgpool fc

The state dict of `Resnet50` has the names, shapes and order of torchvision's resnet50 (the stride of a block is in its 3x3
convolution), so that public weights load; the same seed gives the same initial weights. Below 64 pixels the stem is a
3x3 convolution of stride 1 without pooling, and `conv1.weight` alone differs in shape.
"""

from __future__ import annotations

import math
from typing import ClassVar, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.kinds import boolean, integer
from .image_model import COLOURS, LARGE_IMAGE, ImageModel, initialise_convolutions


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Make a convolution without bias: the BatchNorm after it would subtract the bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


@final
class Projection(nn.Sequential):
    """Shortcut where shapes differ, the paper's option B: a learnt 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


@final
class Padding(nn.Module):
    """Shortcut where shapes differ, the paper's option A, without weights: every `stride`-th pixel, zeros for new channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.new_channels, self.stride = outputs - inputs, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))

    def extra_repr(self) -> str:
        return f"new_channels={self.new_channels}, stride={self.stride}"


@final
class Bottleneck(nn.Module):
    """Residual block: 1x1 down to `width`, 3x3, 1x1 up to four times `width`."""

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = convolution(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]

    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3


@final
class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions."""

    expansion: ClassVar[int] = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]

    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2


Block: TypeAlias = Bottleneck | BasicBlock
Shortcut: TypeAlias = Projection | Padding


def row_of_blocks(
    block: type[Block], shortcut: type[Shortcut], inputs: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    """Make a stage: the first block changes resolution and channels, the others keep them."""
    outputs = width * block.expansion
    downsample = shortcut(inputs, outputs, stride) if stride != 1 or inputs != outputs else None
    first = block(inputs, width, stride, downsample)
    return nn.Sequential(first, *(block(outputs, width, 1, None) for _ in range(depth - 1)))


class ResNet(ImageModel):
    """Abstract ResNet: stem, stages (each half the resolution and twice the width of the one before), classifier."""

    block: ClassVar[type[Block]]
    shortcut: ClassVar[type[Shortcut]]
    depths: ClassVar[tuple[int, ...]]
    smallest_size: ClassVar[int]
    large_stem_from: ClassVar[float]

    def __init__(
        self,
        num_classes: int,
        *,
        width: int,
        image_size: int,
        zero_init_last_gamma: bool,
        channels_last: bool,
        label_smoothing: float,
    ) -> None:
        super().__init__(
            num_classes,
            image_size=image_size,
            smallest_size=self.smallest_size,
            channels_last=channels_last,
            label_smoothing=label_smoothing,
        )
        model = type(self).__name__
        integer(1).check(f"width of {model}", width)
        boolean().check(f"zero_init_last_gamma of {model}", zero_init_last_gamma)
        large = self.image_size >= self.large_stem_from
        self.conv1 = convolution(COLOURS, width, 7, 2) if large else convolution(COLOURS, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        inputs = width
        for row, depth in enumerate(self.depths):
            stage = row_of_blocks(self.block, self.shortcut, inputs, width << row, depth, stride=1 if row == 0 else 2)
            self.add_module(f"layer{row + 1}", stage)
            inputs = (width << row) * self.block.expansion
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, self.num_classes)
        initialise_convolutions(self)
        if zero_init_last_gamma:
            self._zero_last_gammas()
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def checkpoints(self) -> list[str]:
        """Every residual block."""
        return [f"layer{row}.{block}" for row, depth in enumerate(self.depths, 1) for block in range(depth)]

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for row in range(1, len(self.depths) + 1):
            x = getattr(self, f"layer{row}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]

    def _zero_last_gammas(self) -> None:
        """Make each block start as its shortcut, which steadies large batches (Goyal et al. 2017, arXiv 1706.02677)."""
        for module in self.modules():
            if isinstance(module, self.block):
                nn.init.zeros_(module.last_norm().weight)


@final
class Resnet50(ResNet):
    """Build 50 layers of bottleneck blocks; 25.6 million parameters at 1000 classes. Images from 32x32 on.

    Examples:
        >>> model = X.applications.Resnet50(num_classes=10, image_size=32)
        >>> model.checkpoints[0]
        'layer1.0'
    """

    block = Bottleneck
    shortcut = Projection
    depths = (3, 4, 6, 3)
    smallest_size = 32
    large_stem_from = LARGE_IMAGE

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        image_size: int = 224,
        zero_init_last_gamma: bool = False,
        channels_last: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            num_classes,
            width=64,
            image_size=image_size,
            zero_init_last_gamma=zero_init_last_gamma,
            channels_last=channels_last,
            label_smoothing=label_smoothing,
        )


@final
class Resnet20(ResNet):
    """The paper's network for CIFAR-10: widths 16, 32, 64, shortcuts padded with zeros, 269,722 parameters at 10 classes.

    Examples:
        >>> model = X.applications.Resnet20(num_classes=10, image_size=32)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    block = BasicBlock
    shortcut = Padding
    depths = (3, 3, 3)
    smallest_size = 8
    large_stem_from = math.inf

    def __init__(
        self,
        num_classes: int = 10,
        *,
        width: int = 16,
        image_size: int = 32,
        zero_init_last_gamma: bool = False,
        channels_last: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(
            num_classes,
            width=width,
            image_size=image_size,
            zero_init_last_gamma=zero_init_last_gamma,
            channels_last=channels_last,
            label_smoothing=label_smoothing,
        )
