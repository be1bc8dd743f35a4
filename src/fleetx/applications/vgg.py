"""Define VGG16 (Simonyan and Zisserman 2014, arXiv 1409.1556), without BatchNorm.

    features: five stages of 3x3 convolutions, each ending in a 2x2 max-pool | avgpool | classifier: three linear layers

The state dict has the names, shapes and order of torchvision's vgg16, so that public weights load; the same seed gives the
same initial weights. Below 64 pixels `avgpool` leaves one pixel instead of 7x7, and `classifier.0` takes 512 inputs.
"""

from __future__ import annotations

import itertools
from typing import final

import torch
from torch import Tensor, nn

from ..config.kinds import number
from ..errors import DataError
from .image_model import COLOURS, LARGE_IMAGE, ImageModel, initialise_convolutions

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Widths of the convolutions of each stage."""
HIDDEN = 4096
SMALLEST_SIZE = 32


@final
class Features(nn.Sequential):
    """Hold the layers, numbered as public weights name them, and run them by stages once `stages` is set."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.stages: tuple[Stage, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        for part in self.stages or self:
            input = part(input)
        return input


@final
class Stage(nn.Module):
    """Run layers `start` to `stop` of `features`, as a named module that recompute can wrap.

    A convolution alone keeps nothing but its input, so recomputing one by one would save no memory: a stage must be one
    module. It registers no layer: they belong to `features`, and would appear twice in the state dict.
    """

    def __init__(self, features: Features, start: int, stop: int | None) -> None:
        super().__init__()
        self._features = (features,)  # in a tuple, where nn.Module does not look
        self.start, self.stop = start, stop

    def forward(self, x: Tensor) -> Tensor:
        # Looked up at each call: a layer that the user replaced in `features` is the one that runs.
        for layer in itertools.islice(self._features[0], self.start, self.stop):
            x = layer(x)
        return x

    def extra_repr(self) -> str:
        return f"features[{self.start}:{'' if self.stop is None else self.stop}]"


@final
class VGG16(ImageModel):
    """Build 16 layers with weights; 138 million parameters at 1000 classes. Images from 32x32 on.

    Examples:
        >>> model = X.applications.VGG16(num_classes=10, image_size=32)
        >>> len(model.checkpoints)
        5
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        image_size: int = 224,
        channels_last: bool = False,
        label_smoothing: float = 0.0,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(
            num_classes,
            image_size=image_size,
            smallest_size=SMALLEST_SIZE,
            channels_last=channels_last,
            label_smoothing=label_smoothing,
        )
        number(0, below=1).check("dropout of VGG16", dropout)
        self.features = Features(*_feature_layers())
        side = 7 if self.image_size >= LARGE_IMAGE else 1
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.classifier = nn.Sequential(
            nn.Linear(STAGES[-1][-1] * side * side, HIDDEN), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(HIDDEN, self.num_classes),
        )  # fmt: skip
        self._name_stages()
        initialise_convolutions(self)
        for layer in self.classifier:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def checkpoints(self) -> list[str]:
        """The five stages of convolutions."""
        return [f"stage{i}" for i in range(1, len(STAGES) + 1)]

    def forward(self, images: Tensor) -> Tensor:
        if min(images.shape[-2:]) < SMALLEST_SIZE:
            raise DataError(
                f"the images are {list(images.shape[-2:])} pixels; VGG16 halves them five times: {SMALLEST_SIZE} a side at least."
            )
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))  # type: ignore[no-any-return]

    def _name_stages(self) -> None:
        ends = [i + 1 for i, layer in enumerate(self.features) if isinstance(layer, nn.MaxPool2d)]
        stops = [*ends[:-1], None]  # open at the end: a layer that the user appends to `features` runs too
        stages = [Stage(self.features, start, stop) for start, stop in zip([0, *ends[:-1]], stops, strict=True)]
        for name, stage in zip(self.checkpoints, stages, strict=True):
            self.add_module(name, stage)
        self.features.stages = tuple(stages)


def _feature_layers() -> list[nn.Module]:
    layers: list[nn.Module] = []
    inputs = COLOURS
    for widths in STAGES:
        for width in widths:
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2, 2))
    return layers
