"""The tensors that bench/optimizer_step steps over, and the least bytes that a step over them can move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fleetx.applications import Bert_large, Resnet50

NORMS = (nn.LayerNorm, nn.BatchNorm2d)
FLOAT32_BYTES = 4
BUCKET_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Bytes:
    """Moved per parameter. Adapted tensors are read twice where the norms are not known before; the others once."""

    adapted: int
    excluded: int

    def total(self, shapes: Shapes) -> int:
        return self.adapted * shapes.adapted_numel + self.excluded * shapes.excluded_numel


TWO_PASS = {"lars": Bytes(28, 20), "lamb": Bytes(40, 28)}
"""LARS reads p, g for the norms; then it reads p, g, m and writes p, m.
LAMB reads p, g, m, v and writes m, v for the norms; then it reads p, m, v and writes p."""
TOUCH_ONCE = {"lars": Bytes(20, 20), "lamb": Bytes(28, 28)}
TWO_PASS_MASTER = {"lars": Bytes(26, 20), "lamb": Bytes(40, 28)}
"""Gradients of 16 bits, a float32 master that is read and written, and a 16-bit parameter that is only written."""
ONE_NORM_KNOWN = {"lars": Bytes(24, 20)}
"""Of p, carried from the update before; or of g, from code that has read it anyway. With both LARS touches each byte once."""


@dataclass(frozen=True)
class Shapes:
    """A model on the meta device: its names, shapes and kinds of layers, and no memory."""

    name: str
    make: Callable[[], nn.Module]
    tensors: int
    """How many there are to be: a model that has changed makes another bench."""
    numel: int

    @cached_property
    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            model = self.make()
        found = len(list(model.parameters())), sum(p.numel() for p in model.parameters())
        if found != (self.tensors, self.numel):
            raise SystemExit(f"{self.name} has {found[0]} tensors of {found[1]} parameters, not {self.tensors} of {self.numel}")
        return model

    @cached_property
    def excluded(self) -> frozenset[str]:
        """Norm layers and biases, found by the kind of layer: not by our optimizers' own rules, which are checked against it."""
        of_norms = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in self.on_meta.named_modules()
            for name, _ in module.named_parameters(recurse=False)
            if isinstance(module, NORMS)
        }
        return frozenset(of_norms | {name for name, _ in self.on_meta.named_parameters() if name.endswith("bias")})

    @cached_property
    def excluded_numel(self) -> int:
        return sum(p.numel() for name, p in self.on_meta.named_parameters() if name in self.excluded)

    @property
    def adapted_numel(self) -> int:
        return self.numel - self.excluded_numel

    def model(self, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A new one with memory, not yet with values."""
        with torch.device("meta"):
            model = self.make()
        return model.to(dtype).to_empty(device=device)

    def split(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Its parameters: those with decay and a trust ratio, and the excluded ones."""
        named = list(model.named_parameters())
        return [p for name, p in named if name not in self.excluded], [p for name, p in named if name in self.excluded]


BERT_LARGE = Shapes("bert_large", Bert_large, 398, 336_226_108)
RESNET50 = Shapes("resnet50", Resnet50, 161, 25_557_032)
BERT_FOUR_LAYERS = Shapes("bert_4_layers", lambda: Bert_large(layers=4), 78, 84_301_628)
"""Of the layers of BERT-large four: all shapes are there, and a step fits into the memory of a small machine."""
BERT_ONE_LAYER = Shapes("bert_1_layer", lambda: Bert_large(layers=1), 30, 46_512_956)


def odd_views(params: Sequence[Tensor]) -> list[Tensor]:
    """Places for gradients as a reducer makes them: views into flat buckets, last parameter first, here at 4-byte addresses.

    One element of each bucket is left out in front: no view begins at a multiple of 16 bytes by luck.
    """
    buckets: list[list[Tensor]] = [[]]
    room = BUCKET_BYTES // FLOAT32_BYTES
    for param in reversed(params):
        if buckets[-1] and sum(p.numel() for p in buckets[-1]) + param.numel() > room:
            buckets.append([])
        buckets[-1].append(param)
    views: list[Tensor] = []
    for bucket in buckets:
        numels = [p.numel() for p in bucket]
        flat = torch.zeros(1 + sum(numels), dtype=bucket[0].dtype, device=bucket[0].device)[1:]
        views += [piece.view(p.shape) for piece, p in zip(flat.split(numels), bucket, strict=True)]
    return views[::-1]
