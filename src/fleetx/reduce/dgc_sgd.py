"""The user's SGD, of which DGC has taken the momentum: what was sent is applied as it is, all else as before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from ..engine.update import Update, load_in_place

_sgd_step = torch.optim.SGD.step.__wrapped__  # type: ignore[attr-defined]
"""Without the hooks, which torch runs around our own step."""


@final
class SGDHandedOver(Update, torch.optim.SGD):
    """Until `handed_over` names parameters it is torch.optim.SGD, to the bit."""

    def __init__(self, inner: torch.optim.SGD) -> None:
        groups = [{**group, "params": list(group["params"])} for group in inner.param_groups]
        super().__init__(groups, **inner.defaults)
        self.handed_over: set[int] = set()
        """ids of parameters whose gradients have momentum and decay in them."""

    def adopt_groups(self, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
        self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_in_place(self, super().load_state_dict, state_dict)

    def hand_over(self, param: Tensor) -> Tensor | None:
        """Its momentum, which is no longer kept here."""
        momentum: Tensor | None = self.state[param].pop("momentum_buffer", None) if param in self.state else None
        return momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        hidden: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            found = [(p, p.grad) for p in group["params"] if id(p) in self.handed_over and p.grad is not None]
            if found:
                hidden += found
                params, grads = [p for p, _ in found], [grad for _, grad in found]
                lr = group["lr"]
                if isinstance(lr, Tensor):
                    torch._foreach_sub_(params, torch._foreach_mul(grads, lr))
                else:
                    torch._foreach_add_(params, grads, alpha=-lr)
        for param, _ in hidden:
            param.grad = None  # torch leaves out what has none
        try:
            return _sgd_step(self, closure)
        finally:
            for param, grad in hidden:
                param.grad = grad


SGDHandedOver.__name__ = "SGD"  # as the user knows it, and as a checkpoint without DGC calls it
