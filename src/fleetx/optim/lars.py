"""LARS (You et al. 2017, arXiv 1708.03888), as in Fleet's kernel: the learning rate is folded into the velocity.

    ratio = coeff * |p| / (|g| + decay * |p| + epsilon)       1 where the tensor is not adapted, or a norm is zero
    v     = momentum * v + lr * ratio * (g + decay * p)       decay is 0 where the tensor is not decayed
    p     = p - v

A change of the learning rate does not rescale the velocity; in optimizers that wrap torch's SGD it does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from ..config.kinds import boolean, number
from .layerwise import Layerwise
from .list_ops import Norm, Numbers, kernels_take, lars_by_sgd, norms, rate_survives, scaled_rates
from .options import Default
from .param_groups import DEFAULT_EXCLUSIONS
from .work import Work, as_number


def trust_ratio(weight_norm: Norm, grad_norm: Norm, *, decay: float, coefficient: float, epsilon: float) -> Norm:
    """Return the trust ratio, of tensors or of plain numbers, which are faster on a CPU."""
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
    """Compute the new parameter, new velocity and trust ratio of one tensor."""
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
    lengths: Numbers = None,
) -> Tensor | None:
    """Update many tensors as `lars_update`, in place; return their trust ratios, None where they are not adapted.

    `lengths`: norms of the parameters, then of the gradients; None: of these tensors."""
    ratios = None
    rates: Numbers = [lr] * len(params)
    if adapt:
        ratio = functools.partial(trust_ratio, decay=decay, coefficient=coefficient, epsilon=epsilon)
        ratios, rates = scaled_rates(lr, norms([*params, *grads]) if lengths is None else lengths, ratio)
    if momentum and kernels_take(params, grads, velocities) and all(rate_survives(r, params[0].dtype) for r in set(rates)):
        lars_by_sgd(params, grads, velocities, rates=rates, momentum=momentum, decay=decay)
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
    `carry_norms` keeps each parameter's norm from the last update (kernels only). Any other write to a parameter makes the next
    step compute its norm again, except a write to `param.data`: call `forget_norms()` after that.

    Examples:
        >>> optimizer = X.optim.Lars(model.named_parameters(), lr=0.1, momentum=0.9)
        >>> criterion(model(x), y).backward()
        >>> optimizer.step()
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
        self._gradient_norms: dict[int, Tensor] = {}
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
        """Whether the kernels run, which `take_gradient_norms` saves a pass over the gradients."""
        return self.kernels() is not None

    def take_gradient_norms(self, params: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        """Accept the gradients' norms, for the next step alone, from a caller that has computed them already."""
        self._gradient_norms = {id(param): norm for param, norm in zip(params, norms, strict=True)}

    def accepted_norms(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the accepted norms in the order of `params`; None unless all are there, in float32."""
        if not self._gradient_norms:
            return None
        norms = [self._gradient_norms.get(id(param)) for param in params]
        if not norms or any(norm is None or norm.dtype != torch.float32 for norm in norms):
            return None
        return [norm for norm in norms if norm is not None]

    def after_kernels(self) -> None:
        self._gradient_norms = {}

    def forget_norms(self) -> None:
        """Drop carried norms: call it after writing parameters through `.data`, which leaves no trace."""
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

    def prepare(self, work: Work) -> tuple[None, Numbers]:
        return None, norms([*work.params, *work.grads]) if work.adapt else []

    def apply(self, work: Work, ready: None, lengths: Numbers) -> list[Tensor]:
        ratios = lars_lists(work.params, work.grads, work.moments[0], **self._settings(work), lengths=lengths)
        return [] if ratios is None else [ratios]
