"""Nets and data of the zoo: as small as they can be and still have the shape of what people train.

Nets are drawn from torch's random numbers, which differ from rank to rank: rank 0's weights count. The type of all of them is
torch's default one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

FEATURES, CLASSES, ROWS = 8, 4, 8
WORDS, LENGTH = 11, 6
BATCHES = 4
"""Of an epoch; every epoch has the same ones, so that a loss falls."""


# --- data ---------------------------------------------------------------------------------------------------------------


def _numbers(rank: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + 2 * index + rank)


def rows(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Rows whose class a linear teacher decides."""
    x = torch.randn(ROWS, FEATURES, generator=_numbers(rank, index))
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(7))
    return x, (x @ teacher).argmax(dim=1)


def images(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Images whose brightness tells their class."""
    numbers = _numbers(rank, index)
    y = torch.randint(0, CLASSES, (ROWS,), generator=numbers)
    return torch.randn(ROWS, 1, 4, 4, generator=numbers) * 0.3 + y.view(-1, 1, 1, 1), y


def tokens(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Words that count upwards from a random one, and the word after each."""
    first = torch.randint(0, WORDS, (ROWS, 1), generator=_numbers(rank, index))
    words = (first + torch.arange(LENGTH + 1)) % WORDS
    return words[:, :-1], words[:, 1:]


def epoch(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [rows(rank, index) for index in range(BATCHES)]


def image_epoch(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [images(rank, index) for index in range(BATCHES)]


# --- nets ---------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Classifier(nn.Module):
    """A body of equal blocks and a head; `checkpointed` runs the blocks under torch's own checkpoint."""

    def __init__(self, *, checkpointed: str = "", shared: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.inlet = nn.Linear(FEATURES, 16)
        first = Residual(16)
        self.blocks = nn.ModuleList([first, first if shared else Residual(16)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant") if self.checkpointed else block(x)
        out: Tensor = self.head(x)
        return out

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)


def conv_net() -> nn.Sequential:
    """No biases before BatchNorm: their gradient is rounding noise, which Adam would blow up to full steps."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.outlet = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        q, k, v = (part.view(count, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.outlet(seen.transpose(1, 2).reshape(count, length, width))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Gives its loss beside its logits, as the small GPTs do; `tied` shares the words' vectors with the outlet."""

    def __init__(self, *, tied: bool, dropout: float, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList([Layer(width, dropout), Layer(width, dropout)])
        self.norm, self.outlet = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        if tied:
            self.words.weight = self.outlet.weight

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.outlet(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LanguageModel(nn.Module):
    """An LSTM whose hidden state the loop carries from batch to batch."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.width = width
        self.encoder, self.rnn, self.decoder = nn.Embedding(WORDS, width), nn.LSTM(width, width), nn.Linear(width, WORDS)

    def init_hidden(self, count: int) -> tuple[Tensor, Tensor]:
        start = next(self.parameters())
        return start.new_zeros(1, count, self.width), start.new_zeros(1, count, self.width)

    def forward(self, words: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, hidden = self.rnn(self.encoder(words), hidden)
        return self.decoder(out), hidden


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's own weight, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 5)
        self.shift = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.shift)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.mean, self.log_variance = nn.Linear(FEATURES, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.outlet = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, FEATURES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.inlet(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.outlet(code), mean, log_variance


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(state))
        return F.softmax(self.actor(hidden), dim=-1), self.critic(hidden).squeeze(-1)


class TwoTasks(nn.Module):
    """Each batch is of one task: the other one's head has no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 16)
        self.heads = nn.ModuleList([nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        out: Tensor = self.heads[task](torch.tanh(self.body(x)))
        return out


def image_generator() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(3, 6, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 1, 2, stride=2), nn.Tanh()
    )


def image_discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 2, stride=2), nn.LeakyReLU(0.2),
        nn.Conv2d(4, 6, 2, bias=False), nn.BatchNorm2d(6), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 1), nn.Flatten(0),
    )  # fmt: skip


def row_generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, FEATURES))


def row_critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
