"""What fills the slots of a step: the strategy's parts, compiled."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from .ddp import ReducedByDDP
from .slots import Average, Backward, Clip, Merge, Reduce


@dataclass(slots=True)
class Stages:
    merge: Merge
    backward: Backward
    reduce: Reduce
    clip: Clip | None
    update: Optimizer
    average: Average | None

    def after_reduce(self) -> str | None:
        """The part that acts between the reduced gradients and the next forward, beside the update itself; None: none."""
        if self.merge.micro_steps > 1:
            return "gradient_merge"
        if self.clip is not None:
            return "clip_norm"
        if self.backward.checks_finite:
            return "amp"
        return None if self.average is None else "localsgd"

    @property
    def ddp(self) -> ReducedByDDP | None:
        """REDUCE, where it is done inside backward by a wrapper of the model's."""
        return self.reduce if isinstance(self.reduce, ReducedByDDP) else None
