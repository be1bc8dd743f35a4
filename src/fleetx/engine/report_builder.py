"""What a micro-step tells the user: its report, put together from the stages without waiting for the device."""

from __future__ import annotations

from typing import final

from torch import Tensor

from ..dist.comm import Comm
from .buckets import Buckets
from .report import Report
from .slots import Step
from .stages import Stages
from .window import Window


def dense_bytes(buckets: Buckets, comm: Comm) -> int:
    """What one rank sends in a plain all-reduce of all gradients."""
    numbers = sum(p.numel() * p.element_size() for bucket in buckets for p in bucket.params)
    return round(2 * (comm.size - 1) / comm.size * numbers)


@final
class Teller:
    def __init__(self, stages: Stages, buckets: Buckets, comm: Comm) -> None:
        self._stages, self._comm = stages, comm
        self.pair = 0
        """Among the pairs of this process, from 1 (running.py)."""
        self._told_bytes = comm.bytes_sent
        self._dense_bytes = dense_bytes(buckets, comm)

    def report(
        self,
        step: Step,
        window: Window,
        *,
        due: bool,
        updated: bool,
        loss_scale: float | None,
        averaged: bool,
        grad_norm: Tensor | None,
        noise: Tensor | None,
    ) -> Report:
        """`loss_scale`: the one that this update was made with; None for the present one."""
        sent, self._told_bytes = self._comm.bytes_sent - self._told_bytes, self._comm.bytes_sent
        stages, average = self._stages, self._stages.average
        ratios = getattr(stages.update, "trust_ratios", None)
        return Report(
            due=due,
            updated=updated,
            skipped=due and not updated,
            bytes_sent=round(sent),
            loss_scale=stages.backward.scale() if loss_scale is None else loss_scale,
            period=None if average is None else average.period,
            step=step.index,
            micro_steps=window.micro_steps,
            bytes_dense=self._dense_bytes if due else 0,
            pair=self.pair,
            averaged=averaged,
            waited=None if average is None else average.waits,
            trust_ratios=ratios() if updated and callable(ratios) else None,
            _lr=step.lr.detach().clone() if isinstance(step.lr, Tensor) else step.lr,  # a scheduler writes into a tensor
            _losses=tuple(window.losses),
            _weights=tuple(window.weights),
            _grad_norm=grad_norm,
            _noise=noise,
            _kept=stages.reduce.kept() if due else None,
        )
