"""What minimize and backward may be given: a loss that is one number, and a weight that is one too."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..errors import ConfigError


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
    """`mean`: the micro-batches of a window are averaged, not summed."""
    if weight is None:
        return
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigError(
            f"weight is {weight!r}; it must be a finite number of at least 0 (tokens or samples in this micro-batch)."
        )
    if not mean:
        raise ConfigError('weight= asks for a weighted mean, gradient_merge_configs["avg"] = False for a sum. Keep one of them.')
