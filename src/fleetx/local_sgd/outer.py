"""Compute the outer step of an averaging, on flat tensors.

delta   a rank's weights less the anchor, which is the last average
move    what is added to the anchor: torch's SGD step with the negative mean delta as the gradient; with lr 1 and no
        momentum it is the mean delta itself: plain averaging
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OuterRule:
    """Settings of the outer SGD: lr 1 without momentum takes the average as it is; with momentum this is DiLoCo."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    @property
    def is_plain(self) -> bool:
        return self.lr == 1.0 and self.momentum == 0.0


def outer_move(mean_delta: Tensor, velocity: Tensor | None, rule: OuterRule) -> Tensor:
    """Compute what is added to the anchor, in place of `mean_delta`, and update `velocity` (None without momentum).

    Signs are those of a delta, not of a gradient: velocity and move are both negated, which changes no bit.
    """
    if velocity is not None:
        velocity.mul_(rule.momentum).add_(mean_delta)
        if rule.nesterov:
            mean_delta.add_(velocity, alpha=rule.momentum)
        else:
            mean_delta.copy_(velocity)
    return mean_delta if rule.lr == 1.0 else torch.mul(mean_delta, rule.lr, out=mean_delta)
