"""What bench/auto_regret plans for: nets, a batch of each, and their loss. A step takes some 60 ms on one thread of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx import fleet
from fleetx.applications import Bert, BertConfig, Resnet20
from fleetx.errors import ConfigError

LR, MOMENTUM = 1e-3, 0.9
CLASSES, WORDS, LENGTH, MASKED_SHARE = 10, 2000, 64, 0.15
MASKED_OUT = -100


@dataclass(frozen=True)
class Net:
    about: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]


def mlp(width: int, blocks: int) -> nn.Sequential:
    """In blocks of four layers: of one that is computed again three outputs are not kept."""
    layers = [[module for _ in range(4) for module in (nn.Linear(width, width), nn.ReLU())] for _ in range(blocks)]
    return nn.Sequential(*(nn.Sequential(*block) for block in layers))


def vectors(rows: int, width: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(rows, width), torch.randn(rows, width))


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def images(rows: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(rows, 3, 32, 32), torch.randint(0, CLASSES, (rows,)))


def entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sentences(rows: int) -> Callable[[], dict[str, Tensor]]:
    def made() -> dict[str, Tensor]:
        tokens = torch.randint(1, WORDS, (rows, LENGTH))
        labels = torch.where(torch.rand(rows, LENGTH) < MASKED_SHARE, tokens, MASKED_OUT)
        return {"input_ids": tokens, "labels": labels, "next_sentence_label": torch.randint(0, 2, (rows,))}

    return made


def own(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model.loss(batch)  # type: ignore[operator]
    return found


def bert() -> Bert:
    return Bert(BertConfig(vocab_size=WORDS, hidden=128, layers=4, heads=4, max_position=LENGTH))


NETS = {
    "mlp": Net("32 layers of 256, batch 320", lambda: mlp(256, 8), vectors(320, 256), squares),
    "resnet20": Net("ResNet-20 on 32x32 images, batch 12", lambda: Resnet20(num_classes=CLASSES), images(12), entropy),
    "bert": Net("BERT of 4 layers of 128, 64 tokens, batch 8", bert, sentences(8), own),
}
SMALL = {"tiny": Net("12 layers of 32, batch 256", lambda: mlp(32, 3), vectors(256, 32), squares)}
"""Of --smoke."""


def net_of(name: str) -> Net:
    found = {**NETS, **SMALL}.get(name)
    if found is None:
        raise ConfigError(f"--models names {name!r}; there are {', '.join(NETS)}.")
    return found


def fresh(net: Net) -> tuple[nn.Module, torch.optim.SGD, Any]:
    """Weights the same in every call and on every rank; a batch of this rank's own."""
    torch.manual_seed(0)
    model = net.make()
    torch.manual_seed(1 + fleet.worker_index())
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), net.batch()
