"""Base class of image classifiers: loss, top-1 and top-5 accuracy, and the sums of an evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.kinds import boolean, integer, number
from ..errors import DataError
from .image_loading import LoadsImages

COLOURS = 3
LARGE_IMAGE = 64
"""Smallest image size at which the first layers reduce the resolution; below, they keep it."""

# torch ignores label -100 by default: on a GPU, where labels are not checked, a wrong label of -100 would go unnoticed.
_IGNORE_NOTHING = torch.iinfo(torch.int32).min


def topk_correct(logits: Tensor, labels: Tensor, ks: Sequence[int]) -> tuple[Tensor, ...]:
    """Count for each k the rows that have their label among the k largest logits.

    The rank of the label is counted instead of calling `topk`: ties go to the lower class on every device, so a network with
    equal logits for all C classes is right once in C, not always, and NaN is never right.
    """
    for k in ks:
        integer(1).check("k of topk_correct", k)
    own = logits.gather(1, labels.unsqueeze(1))
    ahead = (logits <= own).logical_not_()  # true where either one is NaN
    classes = torch.arange(logits.shape[1], device=logits.device)
    ahead |= (logits == own) & (classes < labels.unsqueeze(1))
    rank = ahead.sum(1)
    return tuple((rank < min(k, logits.shape[1])).sum() for k in ks)


def initialise_convolutions(model: nn.Module) -> None:
    """Initialise weights so that gradients keep their size through a ReLU (He et al. 2015, arXiv 1502.01852), biases to zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class ImageModel(LoadsImages, nn.Module, ABC):
    """Classify images [N, 3, H, W]; a batch is the pair (images, labels)."""

    def __init__(
        self, num_classes: int, *, image_size: int, smallest_size: int, channels_last: bool, label_smoothing: float
    ) -> None:
        super().__init__()
        model = type(self).__name__
        self.num_classes = integer(1).check(f"num_classes of {model}", num_classes)
        self.image_size = integer(smallest_size).check(f"image_size of {model}", image_size)
        self.channels_last = boolean().check(f"channels_last of {model}", channels_last)
        self.label_smoothing: float = number(0, below=1).check(f"label_smoothing of {model}", label_smoothing)

    @property
    @abstractmethod
    def checkpoints(self) -> list[str]:
        """Names of the modules worth recomputing, in the order they run."""

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, num_classes]."""

    def loss(self, batch: Any) -> Tensor:
        """Return the mean cross-entropy, with the model's label smoothing, in float32 (float64 stays)."""
        images, labels = self._pair(batch)
        if len(labels) == 0:
            raise DataError(f"{type(self).__name__}.loss was given a batch of no samples; their mean loss is not defined.")
        return self._cross_entropy(self(images), labels, "mean")

    def tally(self, batch: Any) -> dict[str, Tensor]:
        """Return sums over the batch: `count`, `loss`, `acc1`, `acc5` in float64. Call `eval()` first; no GPU is waited for."""
        images, labels = self._pair(batch)
        with torch.no_grad():
            logits = self(images)
            losses = self._cross_entropy(logits, labels, "none")
            correct = topk_correct(logits, labels, (1, 5))
            count = torch.full((), len(labels), dtype=torch.float64, device=logits.device)
            return {"count": count, "loss": losses.double().sum(), "acc1": correct[0].double(), "acc5": correct[1].double()}

    def accuracy(self, batch: Any) -> dict[str, Tensor]:
        """Return the share of the batch whose label ranks first (`acc1`), and among the first five (`acc5`)."""
        sums = self.tally(batch)
        return {name: sums[name] / sums["count"] for name in ("acc1", "acc5")}

    def _cross_entropy(self, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            wide, labels, ignore_index=_IGNORE_NOTHING, reduction=reduction, label_smoothing=self.label_smoothing
        )

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return images and int64 labels, or raise a `DataError`. Labels on a GPU are not checked: that would wait for it."""
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)):
            raise DataError(f"{type(self).__name__} was given {_shown(batch)}; a batch is a pair (images, labels) of tensors.")
        images, labels = batch
        if images.dim() != 4 or images.shape[1] != COLOURS or not images.is_floating_point():
            raise DataError(f"the images are {_shown(images)}; they must be normalised floats of shape [N, {COLOURS}, H, W].")
        integral = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        if labels.shape != images.shape[:1] or not integral:
            raise DataError(
                f"the labels are {_shown(labels)}; they must be integers of shape [{len(images)}], one for each image."
            )
        labels = labels.long()
        if labels.device.type == "cpu":
            self._require_in_range(labels)
        return images, labels

    def _require_in_range(self, labels: Tensor) -> None:
        outside = (labels < 0) | (labels >= self.num_classes)
        if outside.any():
            row = int(outside.nonzero()[0])
            raise DataError(
                f"sample {row} of the batch has label {int(labels[row])}; labels must be from 0 to {self.num_classes - 1}. "
                f"Correct the data, or build the model with `{type(self).__name__}(num_classes=...)` for them."
            )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
