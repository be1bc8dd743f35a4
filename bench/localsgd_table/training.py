"""One full training of a table of methods, on every rank: ResNet-9 on CIFAR-10, then its accuracy.

The tables are bench/localsgd_table and bench/compression_table; each has its methods and their settings.

Of a run's samples, drawn from its seed, update u takes the next ranks * batch; each rank takes its own part of them. So all
methods see the same images in the same order, on the same ranks. The learning rate is a function of the update's index.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.large_batch.recipe import DECAYS, Trial, lr_at
from bench.large_batch.train import CHANCE, Split, finite, make_optimizer
from bench.lib.image_draws import Draws, draw, micro_batch, normalise
from bench.lib.resnet9 import ResNet9
from bench.localsgd_table.methods import doc
from fleetx import fleet
from fleetx.errors import ConfigError, FleetError

LAST_SHARE = 0.1
CHECK_BATCH = 1000
BEGINS = ("begin_step", "rampup_begin_step")


class Settings(Protocol):
    """The methods of a table. All see the same training; these say in what they differ."""

    def strategy_of(self, method: str, *, updates: int, warmup: int) -> dict[str, Any]:
        """As `DistributedStrategy` takes it, for a run of so many updates of which the first are the warm-up."""
        ...

    def label_of(self, method: str) -> str: ...

    def lr_share_of(self, method: str) -> float:
        """Its highest learning rate, in that of the training."""
        ...


@dataclass(frozen=True)
class Training:
    """What all methods share. Each field is a flag of the bench."""

    epochs: int = field(default=40, metadata=doc("passes over the training images"))
    ranks: int = field(default=4, metadata=doc("processes, all on one device"))
    local_batch: int = field(default=256, metadata=doc("images of one rank in one update, and in a BatchNorm's statistics"))
    width: int = field(default=32, metadata=doc("channels of ResNet-9's first layer"))
    lr: float = field(default=0.8, metadata=doc("highest learning rate of SGD with Nesterov momentum"))
    momentum: float = field(default=0.9, metadata=doc("of SGD, kept by each rank for itself"))
    weight_decay: float = field(default=5e-4, metadata=doc("of weights; norm layers are without"))
    warmup_share: float = field(default=0.05, metadata=doc("share of the run in which the learning rate rises in a line"))
    decay: str = field(default="linear", metadata=doc("how it falls to 0 then: " + ", ".join(DECAYS)))
    label_smoothing: float = field(default=0.1, metadata=doc("share of the target that goes to all classes alike"))
    hole: int = field(default=0, metadata=doc("side in pixels of a square blanked out in each training image; 0: none"))

    def __post_init__(self) -> None:
        least_of = {"epochs": 1, "ranks": 2, "local_batch": 2, "width": 1, "hole": 0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
        for name, below in {
            "lr": math.inf,
            "momentum": 1,
            "weight_decay": math.inf,
            "warmup_share": 1,
            "label_smoothing": 1,
        }.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
                raise ConfigError(f"{name} is {value!r}; it must be a number of at least 0 and below {below}.")
        if self.decay not in DECAYS:
            raise ConfigError(f"decay is {self.decay!r}; it must be one of {', '.join(DECAYS)}.")

    def updates(self, images: int) -> int:
        return self.epochs * images // (self.ranks * self.local_batch)

    def method_lr(self, method: str, settings: Settings) -> float:
        return round(self.lr * settings.lr_share_of(method), 9)


def planned(method: str, training: Training, settings: Settings, images: int) -> tuple[dict[str, Any], int]:
    """The strategy of a run, and its updates."""
    updates = training.updates(images)
    warmup = round(updates * training.warmup_share)
    return settings.strategy_of(method, updates=updates, warmup=warmup), updates


def begin_of(chosen: dict[str, Any]) -> int | None:
    """The last synchronous and dense update of a strategy; None: all are."""
    configs = [value for name, value in chosen.items() if name.endswith("_configs")]
    return next((config[name] for config in configs for name in BEGINS if name in config), None)


class Diary:
    """What the reports of a run say, kept without waiting for the device."""

    def __init__(self, updates: int, device: torch.device) -> None:
        self.from_update = updates - max(1, round(updates * LAST_SHARE))
        self.loss_sum, self.losses = torch.zeros((), device=device), 0
        self.bytes_sent, self.rounds_at = 0, list[int]()

    def note(self, update: int, report: Any, loss: Tensor) -> None:
        self.bytes_sent += report.bytes_sent
        if report.averaged:
            self.rounds_at.append(update + 1)
        if update >= self.from_update:
            self.loss_sum += loss.detach()
            self.losses += 1

    def figures(self, dense: int, updates: int) -> dict[str, Any]:
        rounds = len(self.rounds_at)
        periods = [after - before for before, after in itertools.pairwise([dense, *self.rounds_at])]
        return {
            "updates": updates,
            "dense_updates": dense,
            "rounds": rounds,
            "mean_period": round((updates - dense) / rounds, 3) if rounds else None,
            "periods": [[length, len(list(same))] for length, same in itertools.groupby(periods)],
            "bytes_sent": self.bytes_sent,
            "train_loss": finite(float(self.loss_sum) / self.losses) if self.losses else None,
        }


def train(
    method: str, seed: int, lr: float, training: Training, settings: Settings, train: Split, check: Split
) -> dict[str, Any]:
    """On every rank. The figures are rank 0's, the accuracy that of the average over all ranks."""
    start = time.perf_counter()
    chosen, updates = planned(method, training, settings, len(train))
    model, optimizer = prepared(chosen, seed, lr, training, train)
    draws = draw(len(train), training.epochs, size=32, hole=training.hole, seed=seed).to(train.images.device)
    diary, stopped, accuracy = Diary(updates, train.images.device), None, CHANCE
    try:
        with contextlib.redirect_stdout(None):  # each change of ADACOMM's period; all of them are in the figures
            made_updates(model, optimizer, lr, training, train, draws, diary)
        with optimizer.averaged():
            if fleet.is_first_worker():
                accuracy = accuracy_of(model, check)
    except FleetError as error:  # all ranks raise it at the same place
        stopped = str(error)
    begin = begin_of(chosen)
    figures = diary.figures(updates if begin is None else min(begin, updates), updates)
    return {**figures, "accuracy": accuracy, "stopped": stopped, "seconds": round(time.perf_counter() - start, 2)}


def prepared(chosen: dict[str, Any], seed: int, lr: float, training: Training, train: Split) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = ResNet9(width=training.width, whiten=2, activation="celu", dirac=True)
    model.fit_whitening(train.images)
    model.to(train.images.device)
    settings = Trial("sgd", training.ranks * training.local_batch, lr, training.weight_decay, momentum=training.momentum)
    with contextlib.redirect_stdout(None):
        return fleet.distribute(model, make_optimizer(settings, model), fleet.DistributedStrategy(**chosen))


def made_updates(
    model: nn.Module, optimizer: Any, lr: float, training: Training, train: Split, draws: Draws, diary: Diary
) -> None:
    model.train()
    updates, size = training.updates(len(train)), training.local_batch
    for update in range(updates):
        now = lr_at(update, updates, peak=lr, warmup_share=training.warmup_share, decay=training.decay)
        for group in optimizer.param_groups:
            group["lr"] = now
        first = (update * training.ranks + fleet.worker_index()) * size
        part = draws.slice(first, first + size)
        images, labels = micro_batch(train.images, train.labels, part, hole=training.hole, dtype=torch.float32)
        loss = F.cross_entropy(model(images), labels, label_smoothing=training.label_smoothing)
        diary.note(update, optimizer.minimize(loss), loss)


@torch.no_grad()
def accuracy_of(model: nn.Module, check: Split) -> float:
    """In percent."""
    model.eval()
    right = torch.zeros((), dtype=torch.long, device=check.images.device)
    for images, labels in zip(check.images.split(CHECK_BATCH), check.labels.split(CHECK_BATCH), strict=True):
        right += (model(normalise(images)).argmax(1) == labels).sum()
    model.train()
    return 100 * int(right) / len(check)
