"""The micro-steps that make one update, and the weights by which they are averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from ..dist.comm import Comm
from ..errors import ConfigError, FleetError
from .slots import Backward, Merge

# --- What minimize and backward may be given: a loss that is one number, and a weight that is one too -----------------


def require_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        advice = (
            "Call the loss first: optimizer.minimize(model.loss(batch))."
            if callable(loss)
            else "Give the loss itself, before .item() or float()."
        )
        raise ConfigError(f"minimize/backward was given {type(loss).__name__}, not a tensor. {advice}")
    if loss.numel() != 1 or not loss.requires_grad:
        what = f"has shape {tuple(loss.shape)}" if loss.numel() != 1 else "does not require a gradient"
        raise ConfigError(f"the loss {what}; it must be one number that depends on the model's trainable parameters.")


def require_weight(weight: float | None, *, mean: bool) -> None:
    """Raise unless the weight can be used. `mean`: the micro-batches of a window are averaged, not summed."""
    if weight is None:
        return
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigError(
            f"weight is {weight!r}; it must be a finite number of at least 0 (tokens or samples in this micro-batch)."
        )
    if not mean:
        raise ConfigError('weight= asks for a weighted mean, gradient_merge_configs["avg"] = False for a sum. Keep one of them.')


# ----------------------------------------------------------------------------------------------------------------------


def near_power_of_two(mean: float) -> float:
    """Round to a power of two, so that dividing by it changes no bit."""
    return 2.0 ** round(math.log2(mean)) if mean > 0 else 1.0


@dataclass(slots=True)
class Window:
    """The micro-steps that make one update."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    micro_steps: int = 0
    entered: bool = False
    """A micro-step began that optimizer.step() has not ended."""
    closed: bool = False
    """Its gradients are reduced; only the update is left."""
    applied: bool = False
    """An optimizer that is not the pair's has made the update; what comes next belongs to another window."""
    broken: bool = False
    """A backward failed half-way."""
    bare: bool = False
    """Only bare backwards are in it, whose losses and weights are not known."""
    reduces: int = 0
    """How often it was reduced: once for each bare backward, and else once."""
    shared: bool = False
    """The backward that closed it has reached other pairs too."""
    set_aside: list[Tensor] | None = None
    """What was reduced, bucket by bucket, while another backward makes more that is reduced by itself; else None."""
    sums: list[Tensor] | None = None
    """Under sharding with merge_sharded: this rank's shares of the micro-steps so far, summed over ranks, bucket by bucket."""
    filled: list[bool] | None = None
    """Which parameters had a gradient in these micro-steps, in bucket order."""
    asked_due: bool = False
    """`optimizer.due` was read in the micro-step under way."""

    def enter(self, loss: Tensor | None, weight: float | None) -> None:
        self.bare = loss is None and (self.bare or self.micro_steps == 0)
        self.micro_steps += 1
        self.entered, self.asked_due = True, False
        if loss is not None:
            self.losses.append(loss.detach().clone())  # some losses are views of all the terms they sum up
        if weight is not None:
            self.weights.append(weight)

    def count_bad_losses(self, stays_on: torch.device | None = None) -> float | Tensor:
        """Count them; `stays_on`: a device on which that is 0 or NaN instead, summed over ranks before the host looks at it."""
        losses = self.losses
        if not losses:
            return 0.0
        if losses[-1].device != stays_on:
            return float(sum(not math.isfinite(loss) for loss in losses))
        total = losses[0] if len(losses) == 1 else torch.stack([loss.float() for loss in losses]).sum()
        return total - total

    def refuse_broken(self) -> None:
        if self.broken:
            raise FleetError(
                "a backward failed in this window, so its gradients are incomplete. Call optimizer.zero_grad() to drop them."
            )

    def refuse_closed(self) -> None:
        if self.closed and not self.bare:
            raise FleetError("this window is already reduced. Call optimizer.step() before the next backward.")


@final
class PlainBackward:
    """BACKWARD when nothing scales the loss."""

    needs_loss = False
    checks_finite = False

    def scale(self) -> float:
        return 1.0

    def expects_overflow(self) -> bool:
        return False

    def settle(self, *, finite: bool) -> None:
        return None

    def adopt_scale(self, smallest: float) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


@final
class Weighing:
    """How micro-batches and ranks are averaged: by a factor on each loss, and one on the sums in the buckets."""

    def __init__(self, merge: Merge, backward: Backward, comm: Comm, *, needs_loss: bool, mean_in_backward: bool = False) -> None:
        self._merge, self._backward, self._comm, self._needs_loss = merge, backward, comm, needs_loss
        self._mean_in_backward = mean_in_backward
        """The sums in the buckets are already divided by the number of ranks, by DDP."""
        self.weighted: bool | None = None
        """Whether this run passes weight=; None before the first reduce."""
        self.usual = 1.0
        """What weights are divided by, on all ranks: tokens by the thousand on top of a loss scale would overflow float16."""
        self.last_total = 1.0

    def require(self, weight: float | None, window: Window) -> None:
        """Raise unless every call passes a weight, or none does."""
        require_weight(weight, mean=self._merge.mean)
        weighted = bool(window.weights) if window.micro_steps else self.weighted
        if weighted is not None and weighted != (weight is not None):
            raise ConfigError("some calls of minimize/backward pass weight= and some do not; every call must, or none.")

    def refuse_bare(self, window: Window) -> None:
        """Raise where a bare `loss.backward()` cannot serve: it has no loss that could be scaled, and no weight."""
        if self._needs_loss:
            raise ConfigError(
                "this strategy needs to see the loss, but gradients came from loss.backward(). "
                "Write optimizer.backward(loss) instead, or optimizer.minimize(loss); with strategy.amp in float16, which scales "
                "the loss itself, leave your own GradScaler out."
            )
        if window.weights or self.weighted:
            raise ConfigError("this run passes weight=; a bare loss.backward() has none. Write optimizer.backward(loss, weight).")

    def seed(self, weight: float | None) -> float:
        """Return the factor on the loss. No mean enters here: hooks of the user's see each rank's own gradients, as under DDP."""
        return self._backward.scale() * (1.0 if weight is None else weight / self.usual)

    def factor(self, window: Window, *, alone: bool) -> float:
        """Compute what turns the sums in the buckets into true gradients, once they are summed over ranks; or of this rank
        `alone`."""
        self.weighted = bool(window.weights)
        divisor = float(self._ranks(alone) * (window.micro_steps if self._merge.mean else 1))
        if window.weights:
            self.last_total = math.fsum(window.weights) if alone else self._total(window.weights)
            divisor = self.last_total / self.usual
        if self._mean_in_backward:
            divisor /= self._comm.size
        # All weights 0 on all ranks: the gradients are 0 too, and must not become NaN.
        return 0.0 if divisor == 0.0 else 1.0 / (divisor * self._backward.scale())

    def share(self, window: Window) -> float:
        """Return the share of this rank's gradient in the mean of all."""
        if not window.weights:
            return 1 / self._comm.size
        return math.fsum(window.weights) / self.last_total if self.last_total else 0.0

    def _total(self, weights: list[float]) -> float:
        total = torch.tensor([math.fsum(weights)], dtype=torch.float64, device=self._comm.control_device)
        self._comm.all_reduce(total).wait()
        return float(total)

    def learn(self, window: Window, *, alone: bool) -> None:
        """Learn at an update boundary what a micro-batch usually weighs."""
        if window.weights:
            self.usual = near_power_of_two(self.last_total / (self._ranks(alone) * window.micro_steps))

    def _ranks(self, alone: bool) -> int:
        return 1 if alone else self._comm.size

    def counters(self) -> dict[str, Any]:
        return {"usual_weight": self.usual, "last_total": self.last_total}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self.usual, self.last_total = float(counters["usual_weight"]), float(counters["last_total"])
