"""Set learning rates for large batches: scaled from a reference batch, warmed up, then decayed.

    lr       = linear_scaled_lr(0.1, batch=8192, reference_batch=256)
    schedule = Polynomial(optimizer, total_steps=3000, warmup_steps=300)     # schedule.step() when report.due

Everything counts in updates, from 0 as torch does: update t is the one that follows t others, and `total_steps` updates are
made in all, at t = 0 .. total_steps - 1. Update `warmup_steps` is the first at the full rate; from `total_steps` on the rate is
the end value. Every schedule is a closed form of t: nothing is multiplied up from one update to the next.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any, TypeVar, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..config.kinds import integer, number, optional
from ..errors import ConfigError

__all__ = ["Cosine", "Polynomial", "Warmup", "linear_scaled_lr", "noise_scaled_lr", "sqrt_scaled_lr"]

Rate = TypeVar("Rate", float, Tensor, float | Tensor)

STEPS, WARMUP_STEPS, POSITIVE = integer(1), integer(0), number(above=0.0)
START_FACTOR, END_LR = optional(number(0.0, 1.0)), number(0.0)


# --- rates scaled from a reference batch ------------------------------------------------------------------------------


def linear_scaled_lr(lr: float, *, batch: float, reference_batch: float) -> float:
    """Scale the rate by k for a batch k times as large: right while the gradient's noise dominates.

    Examples:
        >>> X.optim.schedules.linear_scaled_lr(0.1, batch=1024, reference_batch=256)
        0.4
    """
    return float(POSITIVE.check("lr", lr)) * _growth(batch, reference_batch)


def sqrt_scaled_lr(lr: float, *, batch: float, reference_batch: float) -> float:
    """Scale the rate by sqrt(k) for a batch k times as large: the noise of a step stays as it was. Usual with LAMB.

    Examples:
        >>> X.optim.schedules.sqrt_scaled_lr(0.1, batch=1024, reference_batch=256)
        0.2
    """
    return float(POSITIVE.check("lr", lr)) * math.sqrt(_growth(batch, reference_batch))


def noise_scaled_lr(lr: float, *, batch: float, reference_batch: float, noise_scale: float) -> float:
    """Scale linearly far below the gradient noise scale, not at all far above it. All three in one unit, such as samples.

    Examples:
        >>> X.optim.schedules.noise_scaled_lr(0.1, batch=1024, reference_batch=256, noise_scale=0)
        0.1
    """
    scale = number(0.0).check("noise_scale", noise_scale)
    large, small = POSITIVE.check("batch", batch), POSITIVE.check("reference_batch", reference_batch)
    return float(POSITIVE.check("lr", lr) * (1.0 + scale / small) / (1.0 + scale / large))


def _growth(batch: float, reference_batch: float) -> float:
    return float(POSITIVE.check("batch", batch) / POSITIVE.check("reference_batch", reference_batch))


# --- factors of the update index --------------------------------------------------------------------------------------


def warmup_factor(update: int, *, warmup_steps: int, start_factor: float | None = None) -> float:
    """Rise in a straight line from `start_factor` at update 0 to 1 at update `warmup_steps`, and stay at 1.

    None starts at 1 / (warmup_steps + 1): equal steps up from 0, without an update at the rate 0."""
    if update >= warmup_steps:
        return 1.0
    start = 1.0 / (warmup_steps + 1) if start_factor is None else start_factor
    return start + (1.0 - start) * update / warmup_steps


def progress(update: int, *, total_steps: int, warmup_steps: int = 0) -> float:
    """Return how far the decay is: 0 until the warm-up ends, 1 from `total_steps` on."""
    if update >= total_steps:
        return 1.0
    return max(0.0, (update - warmup_steps) / (total_steps - warmup_steps)) if total_steps > warmup_steps else 0.0


def polynomial_factor(progress: float, *, power: float = 2.0) -> float:
    """Return what remains of the way to the end value: (1 - progress) ** power."""
    return float((1.0 - progress) ** power)


def cosine_factor(progress: float) -> float:
    """Return what remains of the way to the end value: half a cosine, from 1 to 0."""
    return (1.0 + math.cos(math.pi * progress)) / 2.0


def between(lr: Rate, end_lr: float, factor: float) -> Rate:
    """Interpolate: `lr` at factor 1, `end_lr` at factor 0, both to the bit."""
    if factor == 1.0:
        return lr
    return (lr - end_lr) * factor + end_lr


# --- torch schedulers -------------------------------------------------------------------------------------------------


class Schedule(LRScheduler, abc.ABC):
    """Abstract schedule: a closed form of the update index, times each group's own rate. State is plain numbers."""

    def __init__(self, optimizer: Optimizer, last_epoch: int) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"{type(self).__name__} was given {type(optimizer).__name__}; it takes a torch.optim.Optimizer.")
        self.kind = type(self).__name__
        super().__init__(optimizer, integer(-1).check("last_epoch", last_epoch))

    @abc.abstractmethod
    def lr_at(self, update: int, lr: float | Tensor) -> float | Tensor:
        """Return the rate of this update for a group whose full rate is `lr`, a number or a tensor."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the arguments it was built with, which a saved state must match."""

    def get_lr(self) -> list[float | Tensor]:
        return [self.lr_at(self.last_epoch, lr) for lr in self.base_lrs]

    _get_closed_form_lr = get_lr

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load as torch does, but refuse the state of another schedule, since either of the two may be meant."""
        for name, mine in {"kind": self.kind, **self.settings()}.items():
            if name not in state_dict or state_dict[name] != mine:
                raise ConfigError(
                    f"the saved schedule has {name}={state_dict.get(name)!r}, this {type(self).__name__} {mine!r}. Build it "
                    "as it was saved; or leave the saved one out and give this one last_epoch=, the updates done less one."
                )
        super().load_state_dict(dict(state_dict))


def _checked_warmup(warmup_steps: int, total_steps: int) -> int:
    checked: int = WARMUP_STEPS.check("warmup_steps", warmup_steps)
    if checked >= total_steps:
        raise ConfigError(
            f"warmup_steps is {checked}, total_steps is {total_steps}; the warm-up is a part of the total, and updates of the "
            "decay are the rest. Count both in updates."
        )
    return checked


def _checked_end(end_lr: float, optimizer: Optimizer) -> float:
    checked: float = END_LR.check("end_lr", end_lr)
    for place, group in enumerate(getattr(optimizer, "param_groups", [])):
        full = float(group.get("initial_lr", group["lr"]))
        if not full >= checked:
            raise ConfigError(
                f"end_lr is {checked}, and group {place} has the rate {full}; a decay ends at or below where it starts."
            )
    return checked


@final
class Warmup(Schedule):
    """Raise the rate from `start_factor` of it to all of it in `warmup_steps` updates; then keep it.

    Examples:
        >>> schedule = X.optim.schedules.Warmup(optimizer, warmup_steps=4)
        >>> rates = []
        >>> for _ in range(5):
        ...     rates.append(round(optimizer.param_groups[0]["lr"], 6))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates[-1] > rates[0]
        True
    """

    def __init__(
        self, optimizer: Optimizer, *, warmup_steps: int, start_factor: float | None = None, last_epoch: int = -1
    ) -> None:
        self.warmup_steps = WARMUP_STEPS.check("warmup_steps", warmup_steps)
        self.start_factor = START_FACTOR.check("start_factor", start_factor)
        super().__init__(optimizer, last_epoch)

    def lr_at(self, update: int, lr: float | Tensor) -> float | Tensor:
        return between(lr, 0.0, warmup_factor(update, warmup_steps=self.warmup_steps, start_factor=self.start_factor))

    def settings(self) -> dict[str, Any]:
        return {"warmup_steps": self.warmup_steps, "start_factor": self.start_factor}


class Decay(Schedule):
    """Abstract: warm up, then lower the rate to `end_lr`, reached after `total_steps` updates, and keep it there."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        warmup_steps: int = 0,
        start_factor: float | None = None,
        end_lr: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = STEPS.check("total_steps", total_steps)
        self.warmup_steps = _checked_warmup(warmup_steps, self.total_steps)
        self.start_factor = START_FACTOR.check("start_factor", start_factor)
        self.end_lr = _checked_end(end_lr, optimizer)
        super().__init__(optimizer, last_epoch)

    @abc.abstractmethod
    def factor(self, progress: float) -> float:
        """Return what remains of the way to `end_lr`."""

    def lr_at(self, update: int, lr: float | Tensor) -> float | Tensor:
        if update < self.warmup_steps:
            return between(lr, 0.0, warmup_factor(update, warmup_steps=self.warmup_steps, start_factor=self.start_factor))
        return between(
            lr, self.end_lr, self.factor(progress(update, total_steps=self.total_steps, warmup_steps=self.warmup_steps))
        )

    def settings(self) -> dict[str, Any]:
        names = ("total_steps", "warmup_steps", "start_factor", "end_lr")
        return {name: getattr(self, name) for name in names}


@final
class Polynomial(Decay):
    """Follow lr(t) = end_lr + (lr - end_lr) * (1 - (t - warmup_steps) / (total_steps - warmup_steps)) ** power

    Examples:
        >>> schedule = X.optim.schedules.Polynomial(optimizer, total_steps=10, warmup_steps=2)
        >>> optimizer.step()
        >>> schedule.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        warmup_steps: int = 0,
        power: float = 2.0,
        end_lr: float = 0.0,
        start_factor: float | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.power = POSITIVE.check("power", power)
        super().__init__(
            optimizer,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            start_factor=start_factor,
            end_lr=end_lr,
            last_epoch=last_epoch,
        )

    def factor(self, progress: float) -> float:
        return polynomial_factor(progress, power=self.power)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "power": self.power}


@final
class Cosine(Decay):
    """Follow lr(t) = end_lr + (lr - end_lr) * (1 + cos(pi * (t - warmup_steps) / (total_steps - warmup_steps))) / 2

    Examples:
        >>> schedule = X.optim.schedules.Cosine(optimizer, total_steps=10, warmup_steps=2)
        >>> optimizer.step()
        >>> schedule.step()
    """

    def factor(self, progress: float) -> float:
        return cosine_factor(progress)


def __dir__() -> list[str]:
    return sorted(__all__)
