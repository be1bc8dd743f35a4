"""Synchronised batch norm: statistics of the joined batch of all ranks, on any device, right for unequal shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ..dist.comm import Comm
from ..engine import dry_steps
from ..engine.modules.compiling import compiled_by
from ..engine.modules.patching import patch_forward
from ..engine.slots import Part, Risk, Site, Slot
from ..errors import ConfigError
from ..recompute.replay import agreed
from .compile import Compile


def joined_moments(counts: Tensor, means: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Join the count, mean and summed squared deviation of a batch from those of its parts (rows).

    Chan's rule: no difference of large numbers, and a part of any size (also none) counts for what it is.
    """
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    return total, mean, (squares + counts * (means - mean) ** 2).sum(0)


def _channels(x: Tensor) -> tuple[list[int], list[int]]:
    """Return the dimensions that are reduced, and the shape that broadcasts a channel vector."""
    dims = [d for d in range(x.dim()) if d != 1]
    return dims, [1 if d != 1 else x.shape[1] for d in range(x.dim())]


class _Normalize(torch.autograd.Function):
    """Normalise by the joined statistics; backward sums its two channel vectors over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inv_std: Tensor, total: Tensor, comm: Comm
    ) -> Tensor:
        _, shape = _channels(x)
        ctx.save_for_backward(x, weight, mean, inv_std, total)
        ctx.comm, ctx.has_bias = comm, bias is not None
        out = (x.to(mean.dtype) - mean.view(shape)) * inv_std.view(shape)
        if weight is not None:
            out = out * weight.to(mean.dtype).view(shape)
        if bias is not None:
            out = out + bias.to(mean.dtype).view(shape)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv_std, total = ctx.saved_tensors
        dims, shape = _channels(x)
        wide = grad.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(shape)) * inv_std.view(shape)
        sums = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        grad_bias, grad_weight = sums.clone()
        if not dry_steps.is_on():  # every rank runs this backward: they all ran the forward, whose gather they all met
            ctx.comm.all_reduce(sums).wait()
        mean_grad, mean_product = (sums / total).view(2, *shape)
        scale = inv_std if weight is None else inv_std * weight.to(mean.dtype)
        grad_x = (wide - mean_grad - normal * mean_product) * scale.view(shape)
        return (
            grad_x.to(x.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(weight.dtype if weight is not None else x.dtype) if ctx.has_bias else None,
            None,
            None,
            None,
            None,
        )


@torch.no_grad()
def _gather_moments(x: Tensor, comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    dims, _ = _channels(x)
    wide = x if x.dtype == torch.float64 else x.float()
    count = x.numel() // max(x.shape[1], 1)
    # var_mean of nothing is NaN; a rank with an empty batch still has to meet the others in the gather.
    var, mean = torch.var_mean(wide, dims, correction=0) if count else (wide.new_zeros(x.shape[1]),) * 2
    mine = torch.cat([wide.new_full((1,), count), mean, var * count])
    channels = x.shape[1]
    if dry_steps.is_on():  # alone: a rank that runs out of memory in a rehearsed step must leave no other waiting
        gathered = mine.repeat(comm.size, 1)
    else:
        gathered, pending = comm.all_gather(mine)
        pending.wait()
    return joined_moments(gathered[:, :1], gathered[:, 1 : 1 + channels], gathered[:, 1 + channels :])


def synchronised_forward(module: _BatchNorm, comm: Comm, *, is_compiled: bool = False) -> Callable[..., Tensor]:
    """Make BatchNorm's forward with joined statistics in training; outside training it is the module's own. `is_compiled`: what
    is around it is, and is to end before it."""

    def joined(x: Tensor) -> Tensor:
        module._check_input_dim(x)
        total, mean, squares = agreed(lambda: _gather_moments(x, comm))
        if module.track_running_stats and module.running_mean is not None and module.running_var is not None:
            _update_running(module, total, mean, squares)
        inv_std = torch.rsqrt(squares / total + module.eps)
        return _Normalize.apply(x, module.weight, module.bias, mean, inv_std, total, comm)  # type: ignore[no-any-return, no-untyped-call]

    in_training = torch.compiler.disable(joined) if is_compiled else joined

    def around(forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        return in_training(x) if module.training else forward(x)

    return around


@torch.no_grad()
def _update_running(module: _BatchNorm, total: Tensor, mean: Tensor, squares: Tensor) -> None:
    assert module.running_mean is not None and module.running_var is not None and module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    factor = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    unbiased = squares / (total - 1).clamp(min=1)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), factor)


def _require_plain_forward(name: str, module: _BatchNorm) -> None:
    if type(module).forward is not _BatchNorm.forward:
        raise ConfigError(
            f"sync_batch_norm cannot take over `{name}`: {type(module).__name__} has a forward of its own, which would be lost. "
            "Use a plain BatchNorm there, followed by what it adds."
        )


@dataclass(frozen=True, kw_only=True)
class SyncBatchNorm(Part):
    """Compute the statistics of BatchNorm over the joined batch of all ranks.

    Examples:
        >>> fleet.DistributedStrategy(sync_batch_norm=X.strategies.SyncBatchNorm()).sync_batch_norm
        True
    """

    name: ClassVar[str] = "sync_batch_norm"
    risk_class: ClassVar[Risk] = Risk.SCHEDULE
    why: ClassVar[str] = "It joins the batch statistics of all ranks."
    talks_in_backward: ClassVar[bool] = True
    changes_forward: ClassVar[bool] = True

    def claims(self) -> frozenset[Slot]:
        return frozenset()  # it changes norm layers alone, and shares no slot with recompute

    def cuts_graphs(self, *, by_user: bool) -> str | None:
        return (
            "sync_batch_norm asks the other ranks in the forward of each norm, which no graph can hold, so compiled code ends "
            "before each and begins again after it: nothing is fused across a norm, and each piece is launched from Python."
        )

    def build(self, site: Site) -> Mapping[Slot, Any]:
        if site.comm.size > 1:
            is_compiled = any(isinstance(part, Compile) for part in site.parts) or any(map(compiled_by, site.model.modules()))
            for name, module in site.model.named_modules():
                if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                    _require_plain_forward(name, module)
                    patch_forward(module, synchronised_forward(module, site.comm, is_compiled=is_compiled))
        return {}

    @classmethod
    def neutral(cls) -> dict[str, Any] | None:
        return None
