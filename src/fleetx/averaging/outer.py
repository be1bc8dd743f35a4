"""The mathematics of one averaging, on flat tensors.

delta   what a rank's weights have moved since the last average, the anchor
step    torch's SGD on the mean delta, as if its negative were a gradient; with lr 1 and no momentum: plain averaging
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class OuterRule:
    """lr 1 without momentum takes the average as it is; with momentum this is DiLoCo."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    @property
    def is_plain(self) -> bool:
        return self.lr == 1.0 and self.momentum == 0.0


def outer_step(anchor: Tensor, mean_delta: Tensor, velocity: Tensor | None, rule: OuterRule) -> None:
    """Move the anchor, in place. `mean_delta` is used up; `velocity` is there where the rule has momentum."""
    if velocity is None:
        anchor.add_(mean_delta, alpha=rule.lr)
        return
    # Signs are those of a delta, not of a gradient: velocity and step are both negated, which changes no bit.
    velocity.mul_(rule.momentum).add_(mean_delta)
    step = mean_delta.add_(velocity, alpha=rule.momentum) if rule.nesterov else velocity
    anchor.add_(step, alpha=rule.lr)
