"""The rows of bench/localsgd_table: synchronous training, Local SGD in all its forms, and the peers', each with its settings.

synchronous, ddp                        gradients reduced in every update: ours, and torch's DistributedDataParallel
k1 ... k16                              ranks update alone, and average every k updates
adacomm                                 the period follows the loss and the learning rate
post_local                              synchronous in the first part of the run, then every 16 updates
diloco                                  every 16 updates, with an outer Nesterov momentum
torch_post_local_4, _16                 torch's PostLocalSGDOptimizer
accelerate_4, _16                       Accelerate's LocalSGD
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetx.errors import ConfigError, did_you_mean

ALONE = "alone"
SYNCHRONOUS, DDP, ADACOMM, POST_LOCAL, DILOCO = "synchronous", "ddp", "adacomm", "post_local", "diloco"
FIXED = {f"k{k}": k for k in (1, 2, 4, 8, 16)}
OURS = (SYNCHRONOUS, *FIXED, ADACOMM, POST_LOCAL, DILOCO)
TORCH = {f"torch_post_local_{k}": k for k in (4, 16)}
ACCELERATE = {f"accelerate_{k}": k for k in (4, 16)}
METHODS = (SYNCHRONOUS, DDP, *FIXED, ADACOMM, POST_LOCAL, DILOCO, *TORCH, *ACCELERATE)
TRAINED = tuple(name for name in OURS if name != "k1")
"""Rows of the accuracy table; a period of 1 is synchronous training with other moments, and costs as much."""


def doc(text: str) -> dict[str, str]:
    return {"doc": text}


@dataclass(frozen=True)
class Settings:
    """Of the methods that have more than a period. Each field is a flag of the bench."""

    begin_share: float = field(
        default=0.0, metadata=doc("share of the run in which every form of Local SGD is synchronous at first; 0: one update")
    )
    init_k: int = field(default=6, metadata=doc("first period of ADACOMM"))
    max_k: int = field(default=32, metadata=doc("longest period of ADACOMM"))
    formula: str = field(default="paper", metadata=doc("paper or fleet: where init_k stands in ADACOMM's formula"))
    post_local_k: int = field(default=16, metadata=doc("period of post-local SGD"))
    post_local_share: float = field(default=0.5, metadata=doc("share of the run in which post-local SGD is synchronous"))
    diloco_k: int = field(default=16, metadata=doc("period of DiLoCo"))
    outer_lr: float = field(default=0.7, metadata=doc("learning rate of DiLoCo's outer optimizer"))
    outer_momentum: float = field(default=0.9, metadata=doc("Nesterov momentum of DiLoCo's outer optimizer"))
    diloco_lr: float = field(default=0.25, metadata=doc("DiLoCo's inner learning rate, in those of the other methods"))

    def __post_init__(self) -> None:
        for name in ("init_k", "max_k", "post_local_k", "diloco_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        for name, most in {"post_local_share": 1, "outer_lr": 10, "outer_momentum": 1, "diloco_lr": 10}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < most:
                raise ConfigError(f"{name} is {value!r}; it must be a number above 0 and below {most}.")
        if isinstance(self.begin_share, bool) or not isinstance(self.begin_share, int | float) or not 0 <= self.begin_share < 1:
            raise ConfigError(f"begin_share is {self.begin_share!r}; it must be a number of at least 0 and below 1.")
        if self.formula not in ("paper", "fleet"):
            raise ConfigError(f"formula is {self.formula!r}; it must be paper or fleet.")

    def strategy_of(self, method: str, *, updates: int, warmup: int) -> dict[str, Any]:
        return strategy(method, self, begin_step(method, updates=updates, warmup=warmup, settings=self))

    def label_of(self, method: str) -> str:
        return label(method, self)

    def lr_share_of(self, method: str) -> float:
        """An outer momentum of 0.9 makes the way of a period up to ten times as long: DiLoCo learns at less."""
        return self.diloco_lr if method == DILOCO else 1.0


def choose(names: str | None, among: Sequence[str]) -> list[str]:
    """`k4,adacomm`, or all."""
    if names is None:
        return list(among)
    for name in (chosen := names.split(",")):
        if name not in among:
            raise ConfigError(f"--methods names {name!r}; there are {', '.join(among)}.{did_you_mean(name, among)}")
    return chosen


def label(method: str, settings: Settings) -> str:
    if method in FIXED:
        return f"Local SGD, k = {FIXED[method]}"
    if method in TORCH:
        return f"torch `PostLocalSGDOptimizer`, k = {TORCH[method]}"
    if method in ACCELERATE:
        return f"Accelerate `LocalSGD`, k = {ACCELERATE[method]}"
    return {
        ALONE: "no communication",
        SYNCHRONOUS: "synchronous (ours)",
        DDP: "synchronous (torch DDP)",
        ADACOMM: f"ADACOMM, init_k = {settings.init_k}",
        POST_LOCAL: f"post-local, k = {settings.post_local_k}",
        DILOCO: f"DiLoCo, k = {settings.diloco_k}",
    }[method]


def first_period(method: str, settings: Settings) -> int:
    """Updates from one exchange to the next; of ADACOMM at first."""
    own = {ADACOMM: min(settings.init_k, settings.max_k), POST_LOCAL: settings.post_local_k, DILOCO: settings.diloco_k}
    return {SYNCHRONOUS: 1, DDP: 1, ALONE: 1, **FIXED, **TORCH, **ACCELERATE, **own}[method]


def begin_step(method: str, *, updates: int, warmup: int, settings: Settings) -> int:
    """The last synchronous update of a run, counted from 1.

    A period that follows the learning rate must not see it rise, and an outer momentum is not to be of a warm-up: those two
    begin with the highest learning rate."""
    shared = max(1, round(updates * settings.begin_share))
    if method == POST_LOCAL:
        return max(shared, round(updates * settings.post_local_share))
    return max(shared, warmup + 1) if method in (ADACOMM, DILOCO) else shared


def strategy(method: str, settings: Settings, begin: int) -> dict[str, Any]:
    """As `DistributedStrategy` takes it."""
    if method == SYNCHRONOUS:
        return {}
    if method == ADACOMM:
        adaptive = {"init_k_steps": settings.init_k, "max_k_steps": settings.max_k, "formula": settings.formula}
        return {"adaptive_localsgd": True, "adaptive_localsgd_configs": {**adaptive, "begin_step": begin}}
    configs: dict[str, Any] = {"k_steps": first_period(method, settings), "begin_step": begin}
    if method == DILOCO:
        configs |= {"outer_lr": settings.outer_lr, "outer_momentum": settings.outer_momentum, "outer_nesterov": True}
    return {"localsgd": True, "localsgd_configs": configs}
