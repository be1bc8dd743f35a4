"""A GradScaler by hand: what it leaves on the optimizer for one step, and what is done with it there.

scaler.scale(loss).backward()      ends with reduced gradients, still scaled: the same on every rank
scaler.unscale_(optimizer)         optional, by the scaler itself; clipping follows
scaler.step(optimizer)             looks for infinities in the reduced gradients, so that all ranks skip or none does

A window that is wholly inside fleet.no_sync() is still local when the scaler looks at it: it is reduced just before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ...errors import ConfigError
from ..buckets import Buckets
from ..gradient_share import SCALER
from ..slots import Slot, Stages
from . import model_pairs

JUDGE = "_unscale_grads_"
"""The method of torch's GradScaler that looks at gradients, of unscale_() and of step() alike."""


@final
@dataclass(frozen=True, slots=True)
class GradScaling:
    found_inf: Tensor | float
    """0 where all gradients are finite."""
    grad_scale: Tensor | None
    """What the gradients are still multiplied by; None: nothing, or the optimizer's own kernel divides by it."""

    @property
    def scale(self) -> float:
        return 1.0 if self.grad_scale is None else float(self.grad_scale)

    @torch.no_grad()
    def unscale(self, buckets: Buckets) -> bool:
        """Make true gradients of scaled ones. Whether they are finite."""
        if bool(self.found_inf):
            return False
        if self.grad_scale is not None:
            buckets.adopt_replaced()
            inverse = self.grad_scale.double().reciprocal()
            for flat in buckets.flats:
                flat.mul_(inverse.to(flat.device, flat.dtype))
        return True


@functools.cache
def watch() -> None:
    """Let every GradScaler of this process look at reduced gradients, from now on; once.

    What each rank has found in its own gradients would differ: the scales would go apart, and a rank that skips its step by
    itself would leave the others waiting. torch has no hook for this.
    A torch without it, or a scaler that does not call it, is refused in step()."""
    judge = getattr(GradScaler, JUDGE, None)
    if judge is None:
        return

    @functools.wraps(judge)
    def judge_reduced(scaler: GradScaler, optimizer: Optimizer, *args: Any, **settings: Any) -> Any:
        for pair in model_pairs.reached_by(optimizer):
            pair.reduce_before_scaler(optimizer)
        return judge(scaler, optimizer, *args, **settings)

    setattr(GradScaler, JUDGE, judge_reduced)


def refuse_unjudged() -> NoReturn:
    raise ConfigError(
        "scaler.step(optimizer) has found gradients that are this rank's own, and that the GradScaler has not judged: they came "
        "inside fleet.no_sync() after scaler.unscale_(optimizer), or the scaler is not torch.amp.GradScaler. Call "
        "scaler.unscale_(optimizer) after the last backward of the window, and run that one outside of fleet.no_sync()."
    )


def scaling_of(optimizer: Any, *, by_kernel: bool = False) -> GradScaling | None:
    """Return what a GradScaler has left on an optimizer that it is about to step; None where there is none."""
    found_inf = vars(optimizer).get("found_inf")
    if found_inf is None:
        return None
    return GradScaling(found_inf, None if by_kernel else vars(optimizer).get("grad_scale"))


@contextlib.contextmanager
def unscaled_here(given: Any, scaling: GradScaling) -> Iterator[None]:
    """Hide the scale from the given optimizer's own kernel, where gradients are unscaled before it runs."""
    held = vars(given)
    hides = scaling.grad_scale is not None and "grad_scale" in held
    before = held.get("grad_scale")
    if hides:
        held["grad_scale"] = None
    try:
        yield
    finally:
        if hides:
            held["grad_scale"] = before


def refuse_unfit(stages: Stages) -> None:
    """Name the parts beside which a GradScaler by hand trains wrong numbers."""
    if stages.backward.checks_finite:
        raise ConfigError("a GradScaler by hand beside strategy.amp in float16, which scales the loss itself. Keep one of them.")
    if stages.merge.micro_steps > 1:
        raise ConfigError(
            "a GradScaler by hand beside strategy.gradient_merge: its scale may change inside a merge window, whose sums would "
            'then be of two scales. Write strategy.amp = True with amp_configs = {"dtype": "float16"} instead of the scaler, or '
            "accumulate by hand inside `with fleet.no_sync():`."
        )
    if stages.shard is not None:
        raise ConfigError(SCALER)
    if not stages.reduce.is_linear:
        raise ConfigError(
            f"a GradScaler by hand beside a strategy that claims `{Slot.REDUCE.value}` and keeps what it did not send: kept in "
            'scaled units it is wrong once the scale changes. Write strategy.amp = True with amp_configs = {"dtype": "float16"}.'
        )
