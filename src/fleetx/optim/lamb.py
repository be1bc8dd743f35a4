"""LAMB (You et al. 2020, arXiv 1904.00962), as in Fleet's kernel: bias-corrected, the ratio not clamped.

m     = beta1 * m + (1 - beta1) * g
s     = beta2 * s + (1 - beta2) * g * g
u     = (m / (1 - beta1^t)) / (sqrt(s / (1 - beta2^t)) + eps) + decay * p      decay is 0 where the tensor is not decayed
ratio = |p| / |u|                                                              1 where not adapted, or a norm is zero
p     = p - lr * ratio * u
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from ..config.kinds import boolean, number
from ..errors import ConfigError
from .layerwise import Layerwise
from .list_ops import Norm, Numbers, adam_by_kernel, directions_by_adam, kernels_take, norms, scaled_rates, subtract
from .options import Default
from .param_groups import DEFAULT_EXCLUSIONS, Flags
from .work import Work, as_number


def trust_ratio(weight_norm: Norm, direction_norm: Norm) -> Norm:
    """Return the ratio that makes an adapted tensor's relative step the learning rate; of tensors, or of plain numbers."""
    positive = (weight_norm > 0) & (direction_norm > 0)
    if positive is False:
        return 1.0
    ratio = weight_norm / direction_norm
    return torch.where(positive, ratio, 1.0) if isinstance(positive, Tensor) else ratio


def lamb_update(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: float,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    adapt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the new parameter, new moments and trust ratio of one tensor; `step` counts from 1."""
    mean = beta1 * mean + (1 - beta1) * grad
    square = beta2 * square + (1 - beta2) * grad * grad
    direction = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps) + decay * param
    ratio = param.new_ones(())
    if adapt:
        ratio = trust_ratio(torch.linalg.vector_norm(param), torch.linalg.vector_norm(direction))
    return param - lr * ratio * direction, mean, square, ratio


def directions(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    *,
    steps: list[Tensor],
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> list[Tensor]:
    """Update the moments in place, and return each tensor's direction, with decay."""
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    counts = torch.stack(steps).double()  # 1 - beta2^t loses four digits in float32
    denominators = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(denominators, (1 - beta2**counts).sqrt().tolist())
    torch._foreach_add_(denominators, eps)
    torch._foreach_mul_(denominators, (1 - beta1**counts).tolist())
    result = list(torch._foreach_div(means, denominators))
    if decay:
        torch._foreach_add_(result, params, alpha=decay)
    return result


class Ready(NamedTuple):
    """Parameters and their directions, block by block; nothing, where the moments' kernel has made the whole update."""

    weights: list[Tensor]
    moves: list[Tensor]


def prepare_lists(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    *,
    steps: list[Tensor],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    adapt: bool,
) -> tuple[Ready, Numbers]:
    """Update the moments of many tensors; return their directions, and the norms of parameters and directions if adapted."""
    fixed = {"beta1": beta1, "beta2": beta2, "eps": eps}
    on_kernels = kernels_take(params, grads, means, squares)
    if on_kernels and not adapt and not decay:
        adam_by_kernel(params, grads, means, squares, steps=steps, lr=float(lr), **fixed)
        return Ready([], []), []
    if on_kernels:
        weights, moves, lengths = directions_by_adam(params, grads, means, squares, steps=steps, decay=decay, **fixed)
        return Ready(weights, moves), lengths
    moves = directions(params, grads, means, squares, steps=steps, decay=decay, **fixed)
    return Ready(params, moves), norms([*params, *moves]) if adapt else []


def apply_lists(ready: Ready, lengths: Numbers, *, lr: float | Tensor, tensors: int, adapt: bool) -> Tensor | None:
    """Subtract the directions of so many tensors; return their trust ratios, None where they are not adapted."""
    ratios, rates = scaled_rates(lr, lengths, trust_ratio) if adapt else (None, [lr] * tensors)
    if ready.weights:
        subtract(ready.weights, ready.moves, factors=rates * (len(ready.weights) // tensors))
    return ratios


@final
class Lamb(Layerwise):
    """Adam with one trust ratio per tensor. `params`: tensors, named tensors, or groups.

    Tensors without weight decay are not adapted, unless `always_adapt`. `decay` and `adapt` (True or False) in a group
    override that, and the exclusions, for all its parameters.

    Examples:
        >>> optimizer = X.optim.Lamb(model.named_parameters(), lr=0.001)
        >>> criterion(model(x), y).backward()
        >>> optimizer.step()
    """

    spellings: ClassVar[dict[str, str]] = {"weight_decay": "lamb_weight_decay", "epsilon": "eps"}
    instead: ClassVar[dict[str, str]] = {
        "amsgrad": "LAMB has no AMSGrad: leave it out",
        "momentum": "Write betas, of which the first is the momentum",
        "beta1": "Write betas=(beta1, beta2)",
        "beta2": "Write betas=(beta1, beta2)",
        "bias_correction": "LAMB always corrects for bias here: leave it out",
    }
    decay_key = "lamb_weight_decay"
    rule_settings = ("lamb_weight_decay", "always_adapt")
    moments = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = Default(1e-6),
        lamb_weight_decay: float = Default(0.01),
        *,
        exclude_from_weight_decay: Sequence[str] = DEFAULT_EXCLUSIONS,
        always_adapt: bool = False,
        model: nn.Module | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        **synonyms: float,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, lamb_weight_decay=lamb_weight_decay, always_adapt=always_adapt)
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
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ConfigError(f"betas is {betas!r}; it must be two numbers, such as (0.9, 0.999).")
        for place, beta in enumerate(betas):
            number(0.0, below=1.0).check(f"betas[{place}]", beta)
        number(0.0).check("eps", group["eps"])
        number(0.0).check("lamb_weight_decay", group["lamb_weight_decay"])
        boolean().check("always_adapt", group["always_adapt"])

    def default_adapt(self, group: dict[str, Any], flags: Flags) -> Flags:
        if group["always_adapt"]:
            return Flags(flags.decay, True, f"{flags.why}; always_adapt")
        if flags.decay and not group["lamb_weight_decay"]:
            return Flags(flags.decay, False, "no weight decay, so not adapted: set always_adapt=True to adapt it")
        return Flags(flags.decay, flags.decay and flags.adapt, flags.why)

    def _settings(self, work: Work) -> dict[str, Any]:
        group = work.group
        return {
            "lr": as_number(group["lr"]),
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "decay": group["lamb_weight_decay"] if work.decay else 0.0,
            "adapt": work.adapt,
        }

    def update_one_by_one(self, work: Work) -> list[Tensor]:
        ratios = []
        moments = zip(*work.moments, strict=True)
        for param, grad, (mean, square), count in zip(work.params, work.grads, moments, work.counts, strict=True):
            settings = {"step": float(count), **self._settings(work)}
            new_param, new_mean, new_square, ratio = lamb_update(param, grad, mean, square, **settings)
            param.copy_(new_param)
            mean.copy_(new_mean)
            square.copy_(new_square)
            ratios.append(ratio)
        return ratios

    def prepare(self, work: Work) -> tuple[Ready, Numbers]:
        return prepare_lists(work.params, work.grads, *work.moments, steps=work.counts, **self._settings(work))

    def apply(self, work: Work, ready: Ready, lengths: Numbers) -> list[Tensor]:
        lr = as_number(work.group["lr"])
        ratios = apply_lists(ready, lengths, lr=lr, tensors=len(work.params), adapt=work.adapt)
        return [] if ratios is None else [ratios]
