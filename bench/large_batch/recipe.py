"""What bench/large_batch trains: the recipe that all runs share, the trials of each cell, and the learning rate of an update.

A cell is an optimizer at a batch, written `lars@8192`. Every cell has the same number of trials; they are listed here, or in a
JSON file: a list of objects with the fields of `Trial`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.lib.resnet9 import ACTIVATIONS, AFTER_WHITENING
from fleetx.errors import ConfigError, did_you_mean
from fleetx.optim.schedules import cosine_factor, polynomial_factor, progress, warmup_factor

OPTIMIZERS = ("sgd", "lars", "lamb")
BATCHES = (512, 2048, 8192)
TUNING_SEED = 0
FINAL_SEEDS = (1, 2, 3)
WHITEN = (0, *AFTER_WHITENING)
RESNET20_FLAGS = "add --whiten 0 --no-dirac --no-frozen-scale --activation relu."
DECAYS: dict[str, Callable[[float], float]] = {  # of how far the decay is, from 0 to 1
    "linear": partial(polynomial_factor, power=1.0),
    "quadratic": partial(polynomial_factor, power=2.0),
    "cosine": cosine_factor,
}


def lr_at(update: int, updates: int, *, peak: float, warmup_share: float, decay: str) -> float:
    """Of update 0 .. updates-1: in a straight line up to `peak` at the end of the warm-up, then down towards 0."""
    warmup = round(updates * warmup_share)
    rise = warmup_factor(update, warmup_steps=warmup)
    return peak * rise * DECAYS[decay](progress(update, total_steps=updates, warmup_steps=warmup))


def ema_keep(batch: int, ema_images: int) -> float:
    """What a moving average keeps in one update, if after `ema_images` images 1/e of it is to be left at any batch."""
    return math.exp(-batch / ema_images)


def _doc(text: str) -> dict[str, str]:
    return {"doc": text}


@dataclass(frozen=True)
class Recipe:
    """The same for all optimizers and batches. Each field is a flag of the bench."""

    epochs: int = field(default=30, metadata=_doc("passes over the training images"))
    micro_batch: int = field(
        default=256, metadata=_doc("images in one backward, and in a BatchNorm's statistics; divides a batch")
    )
    label_smoothing: float = field(default=0.1, metadata=_doc("share of the target that goes to all classes alike"))
    hole: int = field(default=8, metadata=_doc("side in pixels of a square blanked out in each training image; 0: none"))
    ema_images: int = field(default=100_000, metadata=_doc("images over which the averaged weights forget; 0: the last weights"))
    bn_images: int = field(default=8192, metadata=_doc("images that BatchNorm's statistics are taken from anew; 0: running ones"))
    model: str = field(default="resnet9", metadata=_doc("resnet9 or resnet20; for the latter " + RESNET20_FLAGS.rstrip(".")))
    width: int = field(default=64, metadata=_doc("channels of the first layer"))
    zero_init_last_gamma: bool = field(default=False, metadata=_doc("the last BatchNorm of a residual begins with scales of 0"))
    whiten: int = field(
        default=2, metadata=_doc(f"patch of the fixed first layer that whitens: {', '.join(map(str, WHITEN))} (0: none)")
    )
    dirac: bool = field(default=True, metadata=_doc("convolutions begin as the identity in their first outputs"))
    activation: str = field(default="celu", metadata=_doc("one of " + ", ".join(ACTIVATIONS)))
    frozen_scale: bool = field(default=False, metadata=_doc("BatchNorm's scales stay 1, and are not learnt"))
    norm_lr: float = field(default=1.0, metadata=_doc("norm layers and biases learn at so many times the learning rate"))
    alternate_flip: bool = field(default=True, metadata=_doc("mirror an image in every other epoch; otherwise at random"))

    def __post_init__(self) -> None:
        least_of = {"epochs": 1, "micro_batch": 2, "hole": 0, "ema_images": 0, "bn_images": 0, "width": 1, "whiten": 0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}.")
        if self.hole > 32:
            raise ConfigError(f"hole is {self.hole}; an image has 32 pixels each way.")
        _number("label_smoothing", self.label_smoothing, 0, 1)
        _number("norm_lr", self.norm_lr, 0, math.inf)
        for name, choices in {"model": ("resnet9", "resnet20"), "activation": tuple(ACTIVATIONS), "whiten": WHITEN}.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(map(str, choices))}.")
        if self.model == "resnet20" and (self.whiten or self.dirac or self.frozen_scale or self.activation != "relu"):
            raise ConfigError("resnet20 has none of the options of resnet9: " + RESNET20_FLAGS)
        if self.frozen_scale and self.zero_init_last_gamma:
            raise ConfigError("frozen_scale would keep at 0 the scales that zero_init_last_gamma begins with. Choose one.")

    def updates(self, images: int, batch: int) -> int:
        """Whole batches in all epochs together: a batch may reach over the border of an epoch, and only the last rest is lost."""
        return self.epochs * images // batch


@dataclass(frozen=True)
class Trial:
    """The settings of one run. `momentum` is the first beta of LAMB; `lr * lars_coeff` bounds the relative step of LARS."""

    optimizer: str
    batch: int
    lr: float
    weight_decay: float
    momentum: float = 0.9
    beta2: float | None = None
    lars_coeff: float | None = None
    warmup_share: float = 0.2
    decay: str = "linear"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer is {self.optimizer!r}; it must be one of {', '.join(OPTIMIZERS)}."
                + did_you_mean(str(self.optimizer), OPTIMIZERS)
            )
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise ConfigError(f"batch of a trial is {self.batch!r}; it must be a positive integer.")
        _number("lr", self.lr, 0, math.inf)
        _number("weight_decay", self.weight_decay, 0, math.inf)
        _number("momentum", self.momentum, 0, 1)
        _number("warmup_share", self.warmup_share, 0, 1)
        for name, owner, below in (("beta2", "lamb", 1), ("lars_coeff", "lars", math.inf)):
            if (self.optimizer == owner) != (getattr(self, name) is not None):
                raise ConfigError(f"{name} is {getattr(self, name)!r} in a trial of {self.optimizer}; {owner} alone has one.")
            if self.optimizer == owner:
                _number(name, getattr(self, name), 0, below)
        if self.decay not in DECAYS:
            raise ConfigError(f"decay is {self.decay!r}; it must be one of {', '.join(DECAYS)}.")

    @property
    def cell(self) -> str:
        return f"{self.optimizer}@{self.batch}"

    def settings(self) -> dict[str, Any]:
        """The fields that mean something for this optimizer."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def describe(self) -> str:
        return " ".join(f"{name}={value:g}" if name != "decay" else value for name, value in list(self.settings().items())[2:])


def _number(name: str, value: Any, least: float, below: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < below:
        raise ConfigError(f"{name} is {value!r}; it must be a number of at least {least:g} and below {below:g}.")


def trial_from(entry: Any, where: str) -> Trial:
    """A Trial from parsed JSON, or an error that names the entry."""
    known = {one.name for one in fields(Trial)}
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}; a trial is an object with the keys {', '.join(sorted(known))}.")
    for name in entry:
        if name not in known:
            raise ConfigError(f"{where} has the key {name!r}, which no trial has.{did_you_mean(name, known)}")
    try:
        return Trial(**entry)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{where} is not a trial: {error}") from error


def read_trials(path: Path) -> tuple[Trial, ...]:
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the trials {path} cannot be read as JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} must hold a list of trials, each an object such as {json.dumps(GRID[0].settings())}.")
    return tuple(trial_from(entry, f"{path}, trial {number}") for number, entry in enumerate(entries, 1))


def choose_cells(trials: Iterable[Trial], cells: str | None) -> dict[str, list[Trial]]:
    """The trials of each cell, in the order given; with `cells` ("sgd@512,lars@8192") of those alone."""
    by_cell: dict[str, list[Trial]] = {}
    for trial in trials:
        by_cell.setdefault(trial.cell, []).append(trial)
    if cells is None:
        return by_cell
    chosen = cells.split(",")
    for cell in chosen:
        if cell not in by_cell:
            raise ConfigError(f"--cells names {cell!r}; there are trials for {', '.join(by_cell)}.{did_you_mean(cell, by_cell)}")
    return {cell: by_cell[cell] for cell in chosen}


def _sgd(batch: int, warmup_share: float, *settings: tuple[float, float]) -> list[Trial]:
    return [Trial("sgd", batch, lr, decay, warmup_share=warmup_share) for lr, decay in settings]


def _lars(batch: int, warmup_share: float, *settings: tuple[float, float, float]) -> list[Trial]:
    return [
        Trial("lars", batch, lr, decay, lars_coeff=round(step / lr, 6), warmup_share=warmup_share) for lr, step, decay in settings
    ]


def _lamb(batch: int, warmup_share: float, *settings: tuple[float, float, float]) -> list[Trial]:
    return [Trial("lamb", batch, lr, decay, beta2=beta2, warmup_share=warmup_share) for lr, beta2, decay in settings]


def _quadratic(*best: Trial) -> list[Trial]:
    """The same settings with the polynomial decay of the LARS paper; its mean is lower, so that the peak is higher."""
    return [replace(trial, lr=round(1.25 * trial.lr, 6), decay="quadratic") for trial in best]


# Likeliest first, so that a run cut short has seen them.
# SGD: lr, weight decay. LARS: lr (the norms and biases move by it, as under SGD), relative step = lr * lars_coeff, weight decay.
# LAMB: lr (its relative step), beta2, weight decay.
GRID: tuple[Trial, ...] = (
    *_sgd(512, 0.2, (0.8, 5e-4), (0.4, 1e-3), (1.6, 5e-4), (0.8, 1e-3)),
    *_sgd(2048, 0.2, (0.8, 1e-3), (1.6, 5e-4), (1.6, 1e-3), (0.8, 2e-3)),
    *_sgd(8192, 0.3, (0.8, 2e-3), (1.6, 1e-3), (0.4, 4e-3), (0.8, 4e-3)),
    *_lars(512, 0.2, (0.4, 0.012, 5e-4), (0.8, 0.012, 5e-4), (0.4, 0.024, 5e-4), (0.4, 0.008, 5e-4)),
    *_lars(2048, 0.2, (0.8, 0.024, 5e-4), (0.4, 0.024, 5e-4), (0.8, 0.036, 5e-4), (0.8, 0.016, 5e-4)),
    *_lars(8192, 0.2, (1.6, 0.048, 5e-4), (0.8, 0.048, 5e-4), (1.6, 0.034, 5e-4), (1.6, 0.048, 5e-3)),
    *_lamb(512, 0.2, (0.01, 0.999, 0.02), (0.02, 0.99, 0.02), (0.01, 0.99, 0.1), (0.015, 0.99, 0.02)),
    *_lamb(2048, 0.2, (0.02, 0.99, 0.02), (0.03, 0.99, 0.02), (0.02, 0.99, 0.1), (0.04, 0.98, 0.02)),
    *_lamb(8192, 0.2, (0.04, 0.99, 0.02), (0.08, 0.99, 0.02), (0.06, 0.95, 0.02), (0.06, 0.98, 0.1)),
    *_quadratic(  # of the best above, found so in the held-out images
        *_sgd(512, 0.2, (0.8, 5e-4)),
        *_sgd(2048, 0.2, (0.8, 1e-3)),
        *_sgd(8192, 0.3, (0.4, 4e-3)),
        *_lars(512, 0.2, (0.8, 0.012, 5e-4)),
        *_lars(2048, 0.2, (0.8, 0.024, 5e-4)),
        *_lars(8192, 0.2, (1.6, 0.048, 5e-4)),
        *_lamb(512, 0.2, (0.02, 0.99, 0.02)),
        *_lamb(2048, 0.2, (0.03, 0.99, 0.02)),
        *_lamb(8192, 0.2, (0.06, 0.95, 0.02)),
    ),
)
