"""LARS (You et al. 2017, arXiv 1708.03888), by Fleet's kernel: the rate of the day is kept in the velocity.

    ratio = coeff * |p| / (|g| + decay * |p| + epsilon)       1 where the tensor is not adapted, or a norm is zero
    v     = momentum * v + lr * ratio * (g + decay * p)       decay is 0 where the tensor is not decayed
    p     = p - v

A learning rate that changes does not rescale what the velocity holds already: not so in optimizers that wrap torch's SGD.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from ..config.kinds import boolean, number
from . import cpu
from .layerwise import Layerwise
from .lists import Norm, Numbers, norms, scaled_rates
from .options import Default
from .param_groups import DEFAULT_EXCLUSIONS
from .work import Work, as_number


def trust_ratio(weight_norm: Norm, grad_norm: Norm, *, decay: float, coefficient: float, epsilon: float) -> Norm:
    """Of tensors, or of plain numbers, with which a CPU is faster."""
    positive = (weight_norm > 0) & (grad_norm > 0)
    if positive is False:
        return 1.0
    ratio = coefficient * weight_norm / (grad_norm + decay * weight_norm + epsilon)
    return torch.where(positive, ratio, 1.0) if isinstance(positive, Tensor) else ratio


def lars_update(
    param: Tensor,
    grad: Tensor,
    velocity: Tensor,
    *,
    lr: float | Tensor,
    momentum: float,
    decay: float,
    coefficient: float,
    epsilon: float,
    adapt: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """New parameter, new velocity, trust ratio."""
    ratio = param.new_ones(())
    if adapt:
        norms = torch.linalg.vector_norm(param), torch.linalg.vector_norm(grad)
        ratio = trust_ratio(*norms, decay=decay, coefficient=coefficient, epsilon=epsilon)
    velocity = momentum * velocity + lr * ratio * (grad + decay * param)
    return param - velocity, velocity, ratio


def lars_lists(
    params: list[Tensor],
    grads: list[Tensor],
    velocities: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    decay: float,
    coefficient: float,
    epsilon: float,
    adapt: bool,
) -> Tensor | None:
    """`lars_update` of many tensors, in place; the trust ratios of adapted ones."""
    ratios = None
    rates: Numbers = [lr] * len(params)
    if adapt:
        ratio = functools.partial(trust_ratio, decay=decay, coefficient=coefficient, epsilon=epsilon)
        ratios, rates = scaled_rates(lr, norms([*params, *grads]), ratio)
    if (
        momentum
        and cpu.kernels_take(params, grads, velocities)
        and all(cpu.rate_survives(r, params[0].dtype) for r in set(rates))
    ):
        cpu.lars_by_sgd(params, grads, velocities, rates=rates, momentum=momentum, decay=decay)
        return ratios
    steps = torch._foreach_add(grads, params, alpha=decay) if decay else grads
    steps = torch._foreach_mul(steps, rates)
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_add_(velocities, steps)
    torch._foreach_sub_(params, velocities)
    return ratios


@final
class Lars(Layerwise):
    """SGD with momentum and one trust ratio per tensor. `params`: tensors, named tensors, or groups.

    `decay` and `adapt` (True or False) in a group override the exclusions for all its parameters.
    `carry_norms` keeps each parameter's norm from the last update (kernels only); whatever else writes parameters in the
    usual way makes it be measured anew; after a write to `param.data` call `forget_norms()`.
    """

    spellings: ClassVar[dict[str, str]] = {"weight_decay": "lars_weight_decay", "eps": "epsilon"}
    instead: ClassVar[dict[str, str]] = {
        "nesterov": "LARS has no Nesterov momentum: leave it out",
        "dampening": "LARS has no dampening: leave it out",
        "trust_coefficient": "Write lars_coeff",
        "trust_coeff": "Write lars_coeff",
        "eta": "Write lars_coeff",
    }
    decay_key = "lars_weight_decay"
    rule_settings = ("lars_coeff", "lars_weight_decay", "epsilon")
    moments = ("momentum_buffer",)
    counts_steps = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = Default(0.0005),
        epsilon: float = Default(0.0),
        *,
        exclude_from_weight_decay: Sequence[str] = DEFAULT_EXCLUSIONS,
        model: nn.Module | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        carry_norms: bool = False,
        **synonyms: float,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, lars_coeff=lars_coeff, lars_weight_decay=lars_weight_decay, epsilon=epsilon)
        self.carry_norms = boolean().check("carry_norms", carry_norms)
        self._given: dict[int, Tensor] = {}
        super().__init__(
            params,
            {**defaults, "maximize": maximize},
            synonyms=synonyms,
            exclude=exclude_from_weight_decay,
            model=model,
            foreach=foreach,
            fused=fused,
        )

    def check_group(self, group: dict[str, Any]) -> None:
        number(0.0, below=1.0).check("momentum", group["momentum"])
        number(above=0.0).check("lars_coeff", group["lars_coeff"])
        number(0.0).check("lars_weight_decay", group["lars_weight_decay"])
        number(0.0).check("epsilon", group["epsilon"])

    @property
    def wants_gradient_norms(self) -> bool:
        """Whether `take_gradient_norms` saves the kernels a pass over the gradients."""
        return self.kernels() is not None

    def take_gradient_norms(self, params: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        """The norms of the gradients as the coming step finds them, from whoever has read these anyway. For one step."""
        self._given = {id(param): norm for param, norm in zip(params, norms, strict=True)}

    def given_norms(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        """In this order; None unless all are there, in float32."""
        if not self._given:
            return None
        norms = [self._given.get(id(param)) for param in params]
        if not norms or any(norm is None or norm.dtype != torch.float32 for norm in norms):
            return None
        return [norm for norm in norms if norm is not None]

    def after_kernels(self) -> None:
        self._given = {}

    def forget_norms(self) -> None:
        """Somebody has written parameters through `.data`, which nobody can see."""
        if self._kernels:
            self._kernels.forget_norms()

    def _settings(self, work: Work) -> dict[str, Any]:
        group = work.group
        return {
            "lr": as_number(group["lr"]),
            "momentum": group["momentum"],
            "decay": group["lars_weight_decay"] if work.decay else 0.0,
            "coefficient": group["lars_coeff"],
            "epsilon": group["epsilon"],
            "adapt": work.adapt,
        }

    def update_one_by_one(self, work: Work) -> list[Tensor]:
        ratios = []
        for param, grad, (velocity,) in zip(work.params, work.grads, zip(*work.moments, strict=True), strict=True):
            new_param, new_velocity, ratio = lars_update(param, grad, velocity, **self._settings(work))
            param.copy_(new_param)
            velocity.copy_(new_velocity)
            ratios.append(ratio)
        return ratios

    def update_lists(self, work: Work) -> list[Tensor]:
        ratios = lars_lists(work.params, work.grads, work.moments[0], **self._settings(work))
        return [] if ratios is None else [ratios]
