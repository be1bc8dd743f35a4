"""Norms of the reduced gradients: one number for guards, clipping and the report; one for each tensor where the update asks.

LARS needs each gradient's norm. Where a norm of all gradients is taken anyway, taking it tensor by tensor costs no further
pass, and the update is saved one of its own. It asks by `wants_gradient_norms = True`, and is given them by
`take_gradient_norms(params, norms)` right before its step; not where anybody has touched the gradients since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from .buckets import Buckets
from .optimizer_hooks import may_change_gradients


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Euclidean norm of each, without a device synchronisation; 16-bit tensors are summed in float32."""
    narrow = [tensor.dtype.itemsize < 4 for tensor in tensors]
    if all(narrow) or not any(narrow):
        return list(torch._foreach_norm(list(tensors), 2, torch.float32 if any(narrow) else None))
    return [norms_of([tensor])[0] for tensor in tensors]  # 16 bits beside float64: a rare model


def joined(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all tensors together, from the norm of each."""
    if len(norms) == 1:
        return norms[0]
    wide = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(wide) for norm in norms]))
    return total


def global_norm(flats: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all buckets."""
    return joined(norms_of(flats))


@final
class GradientNorms:
    def __init__(self, buckets: Buckets, update: Optimizer) -> None:
        self._buckets, self._update = buckets, update
        self._by_bucket: list[list[Tensor]] | None = None
        self._versions: list[int] = []

    def measure(self) -> Tensor:
        """The global norm of what the buckets hold now."""
        self._by_bucket = None
        if not getattr(self._update, "wants_gradient_norms", False):
            return global_norm(self._buckets.flats)
        self._by_bucket = [norms_of(bucket.views) for bucket in self._buckets]
        self._versions = [bucket.version() for bucket in self._buckets]
        return joined([norm for norms in self._by_bucket for norm in norms])

    def hold(self) -> bool:
        """Whether the norms of each tensor are known, and the gradients are what they were: not written to, not replaced."""
        if self._by_bucket is None or [bucket.version() for bucket in self._buckets] != self._versions:
            return False
        hooks = (self._update._optimizer_step_pre_hooks, optimizer_module._global_optimizer_pre_hooks)
        if any(map(may_change_gradients, hooks)):
            return False  # they run inside step(), and may change gradients
        pairs = (pair for bucket in self._buckets for pair in zip(bucket.params, bucket.views, strict=True))
        return all(param.grad is None or param.grad is view for param, view in pairs)

    def hand_over(self, *, factor: Tensor | None) -> None:
        """Give them to the update. `factor`: what clipping has multiplied the gradients by."""
        assert self._by_bucket is not None
        params: list[Tensor] = []
        given: list[Tensor] = []
        for bucket, norms in zip(self._buckets, self._by_bucket, strict=True):
            if factor is not None:
                rounded = factor.to(bucket.flat.dtype)  # as the gradients were: clipping rounds its factor to their type
                norms = list(torch._foreach_mul(norms, rounded.to(norms[0].dtype)))
            used = [(param, norm) for param, norm in zip(bucket.params, norms, strict=True) if param.grad is not None]
            params += [param for param, _ in used]
            given += [norm for _, norm in used]
        self._update.take_gradient_norms(params, given)  # type: ignore[attr-defined]
        self._by_bucket = None
