"""The gradient noise scale: how large a batch still pays, from norms that a step has anyway.

The gradient over b samples has  E|g_b|^2 = |G|^2 + tr(C)/b,  with G the true gradient and C the covariance of one sample's.
Two batch sizes tell both unknowns. Their ratio  B = tr(C) / |G|^2  is the noise scale (McCandlish et al. 2018): training with
batches of B takes twice the samples and twice the updates of what either could be. Far below B a larger batch is nearly free,
far above it is nearly wasted. Each unknown is smoothed by itself, and divided last: a ratio of noisy numbers is biased.

The small batch is one micro-batch of one rank, the first of a window; the large one is the whole window, over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..config.kinds import number
from ..dist.comm import Comm
from ..errors import ConfigError
from .bucket import Bucket
from .buckets import Buckets, joined, norms_of
from .sidecar import Verdict
from .slots import Merge, Part, Risk, Slot
from .window import Weighing, Window

DECAY = 0.99
"""Decay of the running means from one measurement to the next."""
POSITIVE = number(above=0.0)


def estimates(small_sq: Tensor, large_sq: Tensor, *, small: float | Tensor, large: float | Tensor) -> tuple[Tensor, Tensor]:
    """Unbiased tr(C) and |G|^2 from the mean squared norms of gradients over batches of two sizes."""
    slope = 1.0 / small - 1.0 / large
    return (small_sq - large_sq) / slope, (large_sq / small - small_sq / large) / slope


def smoothed(before: Tensor, trace: Tensor, signal: Tensor, *, decay: float = DECAY) -> Tensor:
    """Compute the running means [tr(C), |G|^2, their weight] after one more measurement; one that is not finite changes
    nothing."""
    after = decay * before + (1.0 - decay) * torch.stack([trace, signal, torch.ones_like(trace)])
    return torch.where(after.isfinite().all(), after, before)


def noise_scale_of(means: Tensor) -> float | None:
    """Compute tr(C) / |G|^2 from [tr(C), |G|^2, their weight]; None where it is not known, or nothing positive. Waits for the
    device."""
    trace, signal, weight = means.tolist()
    if weight <= 0.0:
        return None
    trace, signal = trace / weight, signal / weight  # the means began at 0
    if not (trace > 0.0 and signal > 0.0):
        return None
    ratio = trace / signal
    return ratio if math.isfinite(ratio) else None


def samples_factor(batch: float, noise_scale: float) -> float:
    """Return how many times the fewest possible samples a run with this batch takes: 2 at the noise scale."""
    return float(1.0 + POSITIVE.check("batch", batch) / POSITIVE.check("noise_scale", noise_scale))


def updates_factor(batch: float, noise_scale: float) -> float:
    """Return how many times the fewest possible updates a run with this batch takes: 2 at the noise scale."""
    return float(1.0 + POSITIVE.check("noise_scale", noise_scale) / POSITIVE.check("batch", batch))


def require_measurable(every: int, *, parts: Sequence[Part], merge: Merge, comm: Comm, wrapped: str | None = None) -> None:
    """Refuse what could only give a wrong number, or none. `wrapped`: what reduces inside backward, in our place."""
    if every == 0:
        return
    if wrapped is not None:
        raise ConfigError(
            f"noise_scale_steps is {every}: it needs each rank's own gradients, and {wrapped} averages them inside "
            "backward. Give fleet.distribute(...) the bare module, or set strategy.noise_scale_steps = 0."
        )
    if comm.size * merge.micro_steps == 1:
        raise ConfigError(
            f"noise_scale_steps is {every}: the noise scale compares gradients over a small and a large batch, and "
            "one rank without merging has one. Write strategy.gradient_merge = True; "
            'strategy.gradient_merge_configs = {"k_steps": 2}, '
            "start more ranks, or set strategy.noise_scale_steps = 0."
        )
    for part in parts:
        if Slot.REDUCE in part.claims() and part.risk_class not in (Risk.EXACT, Risk.ROUNDING):
            raise ConfigError(
                f"noise_scale_steps is {every}: the noise scale needs the mean of all ranks' gradients in every update, and "
                f"`{part.name}` reduces something else. Keep one of them: strategy.noise_scale_steps = 0."
            )


@final
class NoiseScaleMeter:
    """Measures every so many updates. Nothing here waits for the device; `means` is replaced, never written to."""

    def __init__(self, every: int, *, merge: Merge, comm: Comm) -> None:
        self.every, self._merge, self._comm = every, merge, comm
        self._norms: list[Tensor] = []
        self._small_sq: Tensor | None = None
        """Squared norm of this rank's first gradient of the window."""
        self._in_weights: bool | None = None
        self.means: Tensor | None = None

    def measures(self, index: int) -> bool:
        """Return whether the update with this index is measured; the same on every rank."""
        return self.every > 0 and index % self.every == 0

    # --- the small batch --------------------------------------------------------------------------------------

    def begin_reduce(self) -> None:
        self._norms = []

    def before_reduce(self, bucket: Bucket) -> None:
        """Measure this rank's own gradient, which without merging exists only here, inside backward, bucket by bucket."""
        if self._merge.micro_steps == 1:
            self._norms += norms_of([bucket.flat])

    def after_micro_step(self, buckets: Buckets, window: Window, weighing: Weighing) -> None:
        """Measure this rank's own gradient, which with merging lies in the buckets after the first micro-step, still scaled and
        weighed."""
        if window.micro_steps == 1 < self._merge.micro_steps:
            # What got no gradient may still hold an earlier window's.
            views = [list(bucket.gradients().values()) for bucket in buckets if not all(bucket.filled)]
            whole = [bucket.flat for bucket in buckets if all(bucket.filled)]
            norms = [norm for tensors in [*views, whole] if tensors for norm in norms_of(tensors)]
            self._small_sq = _undone(norms, weighing.seed(_first_weight(window)), device=next(iter(buckets)).flat.device)

    # --- the large batch --------------------------------------------------------------------------------------

    def after_reduce(self, norm: Tensor, buckets: Buckets, window: Window, weighing: Weighing, *, verdict: Verdict) -> None:
        """Measure the reduced gradients, whose norm is `norm`. Every rank is here, with the same verdict, or with none of them
        measuring."""
        bucket = next(iter(buckets))
        if self._merge.micro_steps == 1:
            self._small_sq = _undone(self._norms, weighing.seed(_first_weight(window)) * bucket.factor, device=bucket.flat.device)
        small_sq, self._small_sq, self._norms = self._small_sq, None, []
        # A window that was flushed is smaller than the others, on every rank.
        if small_sq is None or window.micro_steps < self._merge.micro_steps or (verdict.is_known and not verdict.is_finite()):
            return
        small_sq, small = self._over_ranks(small_sq, 1.0 if not window.weights else window.weights[0])
        large = weighing.last_total if window.weights else float(self._comm.size * self._merge.micro_steps)
        if large > 0.0:
            summed = 1.0 if self._merge.mean else float(self._merge.micro_steps)
            large_sq = (norm.double() / summed).square()
            trace, signal = estimates(small_sq, large_sq, small=small, large=large)
            if not verdict.is_known:
                trace = torch.where(verdict.found == 0.0, trace, math.nan)  # which changes nothing
            self._absorb(trace, signal, in_weights=bool(window.weights))

    def _over_ranks(self, small_sq: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """Compute the mean squared norm by weight, and the batch it stands for: a gradient over w samples has the noise
        tr(C)/w."""
        share = small_sq.new_empty(3)
        share[0] = small_sq * weight
        share[1].fill_(weight)
        share[2].fill_(float(weight > 0.0))
        self._comm.all_reduce(share).wait()
        return share[0] / share[1], share[1] / share[2]

    def _absorb(self, trace: Tensor, signal: Tensor, *, in_weights: bool) -> None:
        if self.means is None or self._in_weights != in_weights:
            self.means = torch.zeros(3, dtype=torch.float64, device=trace.device)
        self._in_weights = in_weights
        self.means = smoothed(self.means, trace, signal)

    # --- resume -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means, "in_weights": self._in_weights, "small_sq": self._small_sq}

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        """Load the running means. `state` is None where the saved run did not measure."""
        held = state or {}
        means, small_sq = held.get("means"), held.get("small_sq")
        self.means = None if means is None else means.to(device)
        self._small_sq = None if small_sq is None else small_sq.to(device)
        self._in_weights, self._norms = held.get("in_weights"), []


def _first_weight(window: Window) -> float | None:
    return window.weights[0] if window.weights else None


def _undone(norms: Sequence[Tensor], factor: float, *, device: torch.device) -> Tensor:
    """Compute the squared norm of the gradient itself, which was multiplied by `factor` (0: by a weight of 0, it counts
    nothing)."""
    if factor == 0.0 or not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return (joined(norms).double() / factor).square()
