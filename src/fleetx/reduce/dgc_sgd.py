"""Apply what DGC received without momentum, which DGC has applied already; update all other parameters by the user's SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from ..engine.own_optimizer import Update, load_in_place

_sgd_step = torch.optim.SGD.step.__wrapped__  # type: ignore[attr-defined]
"""SGD's step without its hooks, which torch runs around the step below."""


@final
class SGDHandedOver(Update, torch.optim.SGD):
    """torch.optim.SGD, to the bit, for all parameters but those in `handed_over`, which get `p -= lr * grad`."""

    def __init__(self, inner: torch.optim.SGD) -> None:
        groups = [{**group, "params": list(group["params"])} for group in inner.param_groups]
        super().__init__(groups, **inner.defaults)
        self.handed_over: set[int] = set()
        """ids of parameters whose gradients include momentum and decay already."""

    def adopt_groups(self, groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
        self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_in_place(self, super().load_state_dict, state_dict)

    def pop_momentum(self, param: Tensor) -> Tensor | None:
        """Remove and return the parameter's momentum; None if it has none yet."""
        momentum: Tensor | None = self.state[param].pop("momentum_buffer", None) if param in self.state else None
        return momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        hidden: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            handed = [(p, p.grad) for p in group["params"] if id(p) in self.handed_over and p.grad is not None]
            if handed:
                hidden += handed
                params, grads = [p for p, _ in handed], [grad for _, grad in handed]
                lr = group["lr"]
                if isinstance(lr, Tensor):
                    torch._foreach_sub_(params, torch._foreach_mul(grads, lr))
                else:
                    torch._foreach_add_(params, grads, alpha=-lr)
        for param, _ in hidden:
            param.grad = None  # SGD skips parameters without a gradient
        try:
            return _sgd_step(self, closure)
        finally:
            for param, grad in hidden:
                param.grad = grad


SGDHandedOver.__name__ = "SGD"  # the name that the user gave, and that a checkpoint without DGC has
