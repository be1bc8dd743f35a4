"""LARS and LAMB in the usual way, as one finds them: a loop over the tensors, some eight to fifteen small operations for each.

They stand beside ours where no other implementation can be imported. The rules are ours to the letter, so the results are
compared too; the operations are in place wherever that saves one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor


def ratio_or_one(ratio: Tensor, weight_norm: Tensor, other_norm: Tensor) -> Tensor:
    return torch.where((weight_norm > 0) & (other_norm > 0), ratio, 1.0)


def lars_step(
    p: Tensor, g: Tensor, velocity: Tensor, *, lr: float, momentum: float, coeff: float, decay: float, adapt: bool
) -> None:
    if not adapt:
        velocity.mul_(momentum).add_(g, alpha=lr)
        p.sub_(velocity)
        return
    weight_norm, grad_norm = p.norm(), g.norm()
    ratio = ratio_or_one(coeff * weight_norm / (grad_norm + decay * weight_norm), weight_norm, grad_norm)
    velocity.mul_(momentum).add_(g.add(p, alpha=decay).mul_(ratio), alpha=lr)
    p.sub_(velocity)


def lamb_step(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    adapt: bool,
) -> None:
    beta1, beta2 = betas
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    update = m / (1 - beta1**step)
    update.div_((v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps))
    if not adapt:
        p.add_(update, alpha=-lr)
        return
    update.add_(p, alpha=decay)
    weight_norm, update_norm = p.norm(), update.norm()
    p.add_(update.mul_(ratio_or_one(weight_norm / update_norm, weight_norm, update_norm)), alpha=-lr)


@final
class UsualLars:
    """Steps over (adapted, excluded) parameters; not a torch optimizer: groups, checks and hooks cost it nothing."""

    def __init__(
        self, adapted: Sequence[Tensor], excluded: Sequence[Tensor], *, lr: float, momentum: float, coeff: float, decay: float
    ):
        self.lr, self.momentum, self.coeff, self.decay = lr, momentum, coeff, decay
        self.work = [(p, torch.zeros_like(p), adapt) for p, adapt in _flagged(adapted, excluded)]

    @torch.no_grad()
    def step(self) -> None:
        fixed = {"lr": self.lr, "momentum": self.momentum, "coeff": self.coeff, "decay": self.decay}
        for p, velocity, adapt in self.work:
            lars_step(p, p.grad, velocity, adapt=adapt, **fixed)  # type: ignore[arg-type]


@final
class UsualLamb:
    def __init__(
        self,
        adapted: Sequence[Tensor],
        excluded: Sequence[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
    ):
        self.lr, self.betas, self.eps, self.decay, self.steps = lr, betas, eps, decay, 0
        self.work = [(p, torch.zeros_like(p), torch.zeros_like(p), adapt) for p, adapt in _flagged(adapted, excluded)]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for p, m, v, adapt in self.work:
            decay = self.decay if adapt else 0.0
            lamb_step(p, p.grad, m, v, step=self.steps, lr=self.lr, betas=self.betas, eps=self.eps, decay=decay, adapt=adapt)  # type: ignore[arg-type]


def _flagged(adapted: Iterable[Tensor], excluded: Iterable[Tensor]) -> list[tuple[Tensor, bool]]:
    return [(p, True) for p in adapted] + [(p, False) for p in excluded]
