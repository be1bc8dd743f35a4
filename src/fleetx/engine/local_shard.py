"""What lies in the buckets in the place of a parameter that torch's fully_shard has divided: this rank's rows of it.

Its `grad` is the parameter's own, seen from here: rows in a plain tensor. What is written there, or put in its place, is what the
parameter shows; and what FSDP adds to the parameter's gradient in backward lands in the bucket. Its hooks are the parameter's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..dist.fully_sharded import local_of, shown_as


@final
class LocalShard(nn.Parameter):
    """This rank's rows of a divided parameter."""

    stands_for: nn.Parameter
    _shown: Tensor | None
    """The parameter's gradient when it was looked at last, and its rows: one object each, since buckets compare by identity."""
    _rows: Tensor | None

    @staticmethod
    def of(param: nn.Parameter) -> LocalShard:
        """Return this rank's rows, in the parameter's own memory."""
        made: LocalShard = torch.Tensor._make_subclass(LocalShard, local_of(param), param.requires_grad)
        made.stands_for, made._shown, made._rows = param, None, None
        return made

    @property
    def grad(self) -> Tensor | None:
        shown = self.stands_for.grad
        if shown is not self._shown:
            self._shown, self._rows = shown, None if shown is None else local_of(shown)
        return self._rows

    @grad.setter
    def grad(self, rows: Tensor | None) -> None:
        if rows is not self._rows or rows is None:
            self._shown, self._rows = None if rows is None else shown_as(self.stands_for, rows), rows
        self.stands_for.grad = self._shown

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Register it where FSDP calls it: once the parameter's gradient is reduced."""
        handle: RemovableHandle = self.stands_for.register_post_accumulate_grad_hook(hook)
        return handle


def whose(param: nn.Parameter) -> nn.Parameter:
    """Return the parameter that the model and the optimizer hold, of one that lies in a bucket."""
    return param.stands_for if isinstance(param, LocalShard) else param
