"""Small networks of many shapes, and which of their modules are computed again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8


# --- the large shapes -------------------------------------------------------------------------------------------------------


class ConvBlock(nn.Module):
    """The second norm averages over all batches (momentum=None): a batch counted twice is seen for ever."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm, self.mean_norm = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs, momentum=None)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        x = x if skip is None else torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], dim=1)
        return F.relu(self.mean_norm(self.leave(self.dropout(F.relu(self.norm(self.enter(x)))))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ConvBlock(1, 4), ConvBlock(4, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x.view(-1, 1, 2, 4)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = ConvBlock(1, 2), ConvBlock(2, 4), ConvBlock(4, 4)
        self.up2, self.up1 = ConvBlock(8, 4), ConvBlock(6, 2)
        self.head = nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x.view(-1, 1, 2, 4).repeat(1, 1, 2, 1))
        second = self.down2(F.max_pool2d(first, 2))
        x = self.up2(self.middle(F.max_pool2d(second, 2)), skip=second)
        return self.head(self.up1(x, skip=first)).mean((2, 3))


def tokens(x: Tensor) -> Tensor:
    """Rows of numbers as sequences of four tokens, `WIDTH` wide."""
    return x.unsqueeze(1) * torch.arange(1, 5, dtype=x.dtype, device=x.device).view(1, 4, 1) / 2


class TorchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = tokens(x)
        hidden = torch.ones(4, 4, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=hidden)
        return self.head(x.mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor, *, causal: bool = False) -> Tensor:
        key, value = self.key_value(seen).chunk(2, dim=-1)
        scores = self.query(x) @ key.transpose(1, 2) / WIDTH**0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e4)
        return self.out(F.dropout(scores.softmax(-1), 0.1, self.training) @ value)


class DecoderLayer(nn.Module):
    """Self attention, cross attention where there is a memory, feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(), Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.feed, self.back, self.dropout = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor, memory: Tensor | None = None, *, causal: bool = True) -> Tensor:
        y = self.norms[0](x)
        x = x + self.dropout(self.own(y, y, causal=causal))
        if memory is not None:
            x = x + self.dropout(self.cross(self.norms[1](x), memory))
        return x + self.dropout(self.back(F.gelu(self.feed(self.norms[2](x)))))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        for layer in self.encoder:
            layer.cross, layer.norms[1] = None, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        memory, y = tokens(x), tokens(x.flip(1))
        for layer in self.encoder:
            memory = layer(memory, None, causal=False)
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(y.mean(1))


# --- units with particular arguments, results, or state ---------------------------------------------------------------------


class Chain(nn.Module):
    """`first`, the unit, `last`. `use` says how the unit is called."""

    def __init__(self, unit: nn.Module, use: Callable[[nn.Module, Tensor], Tensor] = lambda unit, x: unit(x)) -> None:
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(WIDTH, WIDTH), unit, nn.Linear(WIDTH, 4)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self.unit, torch.tanh(self.first(x))))


class Inner(nn.Module):
    """A unit of two layers and a dropout; `change` is what a test wants to happen between them."""

    def __init__(self, change: Callable[[Inner, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.enter, self.leave, self.change = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.enter(x)), 0.2, self.training)
        return torch.tanh(self.leave(x if self.change is None else self.change(self, x)))


class ManyArguments(Inner):
    def forward(self, x: Tensor, *nested: Any, scale: float, mode: str, nothing: None, by_name: dict[str, Any]) -> Tensor:  # type: ignore[override]
        pair, (deep, _) = nested[0]
        x = x * scale + pair[0] * pair[1] + deep["deeper"][0]
        return super().forward(torch.sin(x) if mode == "sine" else x) + by_name["bias"]


def call_with_many_arguments(unit: nn.Module, x: Tensor) -> Tensor:
    nested = [[x, x.detach() + 1], ({"deeper": [torch.tanh(x)]}, None)]
    return unit(x, nested, scale=0.5, mode="sine", nothing=None, by_name={"bias": x.sum(1, keepdim=True), "unused": "text"})


@dataclass
class Kept:
    hidden: Tensor
    label: str
    rest: list[Tensor] = field(default_factory=list)


class Both(NamedTuple):
    first: Tensor
    second: dict[str, Any]


class ManyResults(Inner):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        hidden = torch.tanh(self.enter(x))
        out = super().forward(hidden)
        return {
            "tuple": (out, hidden, None),
            "dict": {"out": out, "nested": [hidden, 3]},
            "dataclass": Kept(out, "kept", [hidden]),
            "named tuple": Both(out, {"hidden": hidden}),
        }[self.kind]


def join_results(unit: nn.Module, x: Tensor) -> Tensor:
    found = unit(x)
    if isinstance(found, Kept):
        return found.hidden * found.rest[0]
    if isinstance(found, Both):
        return found.first * found.second["hidden"]
    return found["out"] * found["nested"][0] if isinstance(found, dict) else found[0] * found[1]


def call_three_times(unit: nn.Module, x: Tensor) -> Tensor:
    once = unit(x)
    return unit(once) + unit(x.detach()) * once


class Norm(Inner):
    """Its running statistics count calls, also those of several calls in one forward."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: self.norm(x))
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)


class Counting(Inner):
    """Its output depends on a buffer that it counts up in place, and on a large one that is never changed."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: x / (1 + self.count.add_(1)) + self.large[: x.shape[1]])
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("large", torch.linspace(0, 1, 20_000))


class Replacing(Inner):
    """A running mean that is a new tensor after each call, and enters the output."""

    def __init__(self) -> None:
        super().__init__(Replacing.centre)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def centre(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def spectral() -> nn.Module:
    """A power iteration on each access of the weight, in buffers of the parametrization."""
    unit = Inner()
    nn.utils.parametrizations.spectral_norm(unit.enter)
    return unit


def old_spectral() -> nn.Module:
    """The same by a forward pre-hook on a layer of the unit."""
    unit = Inner()
    nn.utils.spectral_norm(unit.leave)
    return unit


def draw_from_python_and_numpy(unit: Inner, x: Tensor) -> Tensor:
    x = x * (random.random() + 0.5) + float(np.random.rand())
    return x.flip(1) if random.random() < 0.5 else x


def partly_frozen() -> nn.Module:
    unit = Inner()
    unit.enter.requires_grad_(False)
    unit.leave.bias.requires_grad_(False)
    return unit


class FrozenNet(nn.Module):
    """A frozen unit on frozen inputs, a trained one on frozen inputs, one with a frozen part, a frozen one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Inner(), Inner(), partly_frozen(), Inner()])
        self.last = nn.Linear(WIDTH, 4)
        for index in (0, 3):
            self.units[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return self.last(x)


class OwnCheckpoint(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before, self.inside, self.reentrant = Inner(), Inner(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.before(x) + checkpoint(self.inside, torch.sin(x), use_reentrant=self.reentrant)


class KeepsLoss(Inner):
    """An extra loss left in an attribute, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__(KeepsLoss.keep)

    def keep(self, x: Tensor) -> Tensor:
        self.extra = x.square().mean()
        return x


def add_kept_loss(unit: nn.Module, x: Tensor) -> Tensor:
    out = unit(x)
    return out + unit.extra


class Mixed(Inner):
    """A stretch inside the unit that the model itself keeps in float32, whatever is around."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: in_float32(self.careful, x))
        self.careful = nn.Linear(WIDTH, WIDTH)


def in_float32(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return module(x.float())


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    units: tuple[str, ...]


NETS: dict[str, Net] = {
    "convolutions": Net(ConvNet, ("blocks.*",)),
    "u-net": Net(UNet, ("down1", "down2", "middle", "up2", "up1")),
    "torch transformer": Net(TorchTransformer, ("layers.*",)),
    "encoder and decoder": Net(EncoderDecoder, ("encoder.*", "decoder.0", "decoder.1")),
    "arguments": Net(lambda: Chain(ManyArguments(), call_with_many_arguments), ("unit",)),
    "tuple": Net(lambda: Chain(ManyResults("tuple"), join_results), ("unit",)),
    "dict": Net(lambda: Chain(ManyResults("dict"), join_results), ("unit",)),
    "dataclass": Net(lambda: Chain(ManyResults("dataclass"), join_results), ("unit",)),
    "named tuple": Net(lambda: Chain(ManyResults("named tuple"), join_results), ("unit",)),
    "called three times": Net(lambda: Chain(Norm(), call_three_times), ("unit",)),
    "frozen": Net(FrozenNet, ("units.*",)),
    "counting buffer": Net(lambda: Chain(Counting(), call_three_times), ("unit",)),
    "replaced buffer": Net(lambda: Chain(Replacing(), call_three_times), ("unit",)),
    "spectral norm": Net(lambda: Chain(spectral(), call_three_times), ("unit",)),
    "older spectral norm": Net(lambda: Chain(old_spectral(), call_three_times), ("unit",)),
    "python and numpy": Net(lambda: Chain(Inner(draw_from_python_and_numpy), call_three_times), ("unit",)),
    "own checkpoint": Net(lambda: Chain(OwnCheckpoint(False)), ("unit",)),
    "own reentrant checkpoint": Net(lambda: Chain(OwnCheckpoint(True)), ("unit",)),
    "loss in an attribute": Net(lambda: Chain(KeepsLoss(), add_kept_loss), ("unit",)),
}
