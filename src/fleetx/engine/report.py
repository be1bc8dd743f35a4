"""What one micro-step did. Making a report never waits for the device; reading a field may."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from ..dist.comm import Comm
from .buckets import Buckets
from .local_shard import whose
from .noise_scale import noise_scale_of
from .sidecar import Verdict
from .slots import Stages, Step
from .window import Window

if TYPE_CHECKING:
    from ..optim.trust_ratio_report import TrustRatios
    from .slots import Kept


def mean_loss(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor | None:
    """Compute the mean in float64, by weight where weights are given; None where there is no loss, or none that counts."""
    if not losses or (weights and not any(weights)):
        return None
    if len(losses) == 1:
        return losses[0].double()
    stacked = torch.stack([loss.double() for loss in losses])
    if not weights:
        return stacked.mean()
    # By Python's numbers: a tensor of them would have to be copied to the device, which waits for it.
    return torch.stack([loss * weight for loss, weight in zip(stacked, weights, strict=False)]).sum() / math.fsum(weights)


SHOWN = ("due", "updated", "skipped", "bytes_sent", "loss_scale", "period", "step", "micro_steps", "bytes_dense", "averaged")
"""What the text of a report shows."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """None

    Examples:
        >>> model, optimizer = fleet.distribute(model, optimizer)
        >>> report = optimizer.minimize(criterion(model(x), y))
        >>> report.due, report.updated, report.bytes_sent  # one worker sends nothing
        (True, True, 0)
    """

    due: bool
    """This call closed a window: the same on every rank, also when fp16 skipped. Schedulers, EMA and saving follow it."""
    bytes_sent: int
    """What this rank put on the wire since the last report."""
    loss_scale: float = 1.0
    period: int | None = None
    """Updates between two averagings (Local SGD)."""
    step: int = 0
    """The update that this micro-step belongs to, from 1; updates that were skipped count too."""
    micro_steps: int = 0
    """Micro-steps of the window so far."""
    bytes_dense: int = 0
    """What a dense all-reduce of this update's gradients would have sent; 0 inside a window."""
    averaged: bool = False
    """The weights are a new average over all ranks (Local SGD)."""
    waited: dict[int, float] | None = None
    """Seconds in which each rank waited for the others, by rank, at the averaging before the last; a slow rank waits least."""
    pair: int = 0
    """Which pair of model and optimizer, in the order of fleet.distribute, from 1."""
    _lr: float | Tensor | None = None
    _losses: tuple[Tensor, ...] = ()
    _weights: tuple[float, ...] = ()
    _grad_norm: Tensor | None = None
    _noise: Tensor | None = None
    _kept: Kept | None = None
    _verdict: Verdict | None = None
    _trust_ratios: TrustRatios | None = None

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{name}={getattr(self, name)!r}' for name in SHOWN)})"

    @property
    def updated(self) -> bool:
        """The parameters changed."""
        return self._verdict is not None and self._verdict.is_finite()

    @property
    def skipped(self) -> bool:
        """The window was due, but its gradients were not finite."""
        return self.due and not self.updated

    @property
    def knows_outcome(self) -> bool:
        """Whether `updated` and `skipped` can be read without waiting for the device."""
        return self._verdict is None or self._verdict.has_arrived

    @property
    def trust_ratios(self) -> TrustRatios | None:
        """Of this update, by layer (LARS, LAMB); None where none was made."""
        return self._trust_ratios if self._trust_ratios is not None and self.updated else None

    def trust_ratios_on_device(self) -> TrustRatios | None:
        """Return the trust ratios without asking whether the update was made; if it was not, they mean nothing."""
        return self._trust_ratios

    @property
    def loss(self) -> float | None:
        """Mean of this rank's losses over the window so far, by weight where weights are given."""
        mean = self.loss_on_device()
        return None if mean is None else float(mean)

    def loss_on_device(self) -> Tensor | None:
        """Return the loss as a tensor, without waiting for the device."""
        return mean_loss(self._losses, self._weights)

    def grad_norm_on_device(self) -> Tensor | None:
        return self._grad_norm

    def noise_on_device(self) -> Tensor | None:
        """Return the running means from which `noise_scale_of` computes the noise scale, without waiting for the device."""
        return self._noise

    @property
    def lr(self) -> float | None:
        """Of the optimizer's first group, at this update."""
        return None if self._lr is None else float(self._lr)

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the reduced gradients before clipping; None where nothing needed it."""
        return None if self._grad_norm is None else float(self._grad_norm)

    @property
    def density(self) -> float | None:
        """Numbers that this update put on the wire, in those of a dense reduce (DGC, PowerSGD); None elsewhere.

        Of a sparse entry the number counts, and not its place."""
        return None if self._kept is None else self._kept.density

    @property
    def residual_norm(self) -> float | None:
        """Norm of the gradients that this rank has not sent yet, as shares of the mean (DGC, PowerSGD). Computed when it is
        read, which must be before the next update; None later, and where nothing is kept."""
        return None if self._kept is None else self._kept.residual_norm()

    @property
    def noise_scale(self) -> float | None:
        """The critical batch, smoothed over the measurements so far (strategy.noise_scale_steps): McCandlish et al. 2018.

        A run with batches of this size takes twice the fewest possible samples, and twice the fewest possible updates. In
        micro-batches of one rank; where minimize is given weight=, in its unit: samples or tokens. None: not known yet.
        """
        return None if self._noise is None else noise_scale_of(self._noise)


# What a micro-step tells the user: its report, put together from the stages without waiting for the device.


def dense_bytes(buckets: Buckets, comm: Comm) -> int:
    """Count the bytes that one rank sends in a plain all-reduce of all gradients."""
    numbers = sum(whose(p).numel() * p.element_size() for bucket in buckets for p in bucket.params)
    return round(2 * (comm.size - 1) / comm.size * numbers)


@final
class ReportBuilder:
    def __init__(self, stages: Stages, buckets: Buckets, comm: Comm) -> None:
        self._stages, self._comm = stages, comm
        self.pair = 0
        """Among the pairs of this process, from 1 (running.py)."""
        self._reported_bytes = comm.bytes_sent
        self._dense_bytes = dense_bytes(buckets, comm)

    def report(
        self,
        step: Step,
        window: Window,
        *,
        due: bool,
        verdict: Verdict | None,
        loss_scale: float | None,
        averaged: bool,
        grad_norm: Tensor | None,
        noise: Tensor | None,
    ) -> Report:
        """Build the report of a call. `verdict`: whether the update was made; None inside a window. `loss_scale`: the one of the
        update; None for the present one."""
        sent, self._reported_bytes = self._comm.bytes_sent - self._reported_bytes, self._comm.bytes_sent
        stages, average = self._stages, self._stages.average
        ratios = getattr(stages.update, "trust_ratios", None)
        return Report(
            due=due,
            bytes_sent=round(sent),
            loss_scale=stages.backward.scale() if loss_scale is None else loss_scale,
            period=None if average is None else average.period,
            step=step.index,
            micro_steps=window.micro_steps,
            bytes_dense=self._dense_bytes if due else 0,
            pair=self.pair,
            averaged=averaged,
            waited=None if average is None else average.waits,
            _lr=step.lr.detach().clone() if isinstance(step.lr, Tensor) else step.lr,  # a scheduler writes into a tensor
            _losses=tuple(window.losses),
            _weights=tuple(window.weights),
            _grad_norm=grad_norm,
            _noise=noise,
            _kept=stages.reduce.kept() if due else None,
            _verdict=verdict if due else None,
            _trust_ratios=ratios() if due and callable(ratios) else None,
        )
