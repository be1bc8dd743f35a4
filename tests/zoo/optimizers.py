"""Optimizers of the zoo, those with methods of their own, and an average of weights kept by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


def sgd(params: Iterable[Tensor], lr: float = 0.1) -> SGD:
    return SGD(params, lr=lr, momentum=0.9, weight_decay=1e-3)


class SAM(Optimizer):
    """Sharpness-aware minimisation: climb, look at the gradient there, come back, step."""

    def __init__(self, params: Iterable[Tensor], base: type[Optimizer], radius: float, **settings: Any) -> None:
        super().__init__(params, {"radius": radius, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for _, p in pairs]).norm()
        for group, p in pairs:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=float(group["radius"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("SAM is stepped by first_step() and second_step()")


class ScheduleFree(Optimizer):
    """Gradients are taken between the fast weights and their average; `eval()` shows the average, `train()` goes back."""

    def __init__(self, params: Iterable[Tensor], lr: float, share: float) -> None:
        super().__init__(params, {"lr": lr, "share": share, "updates": 0, "training": True})

    def eval(self) -> None:
        self._move(training=False, factor=lambda share: 1 - 1 / share)

    def train(self) -> None:
        self._move(training=True, factor=lambda share: 1 - share)

    @torch.no_grad()
    def _move(self, *, training: bool, factor: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "fast" in self.state[p]:
                        p.lerp_(self.state[p]["fast"], factor(group["share"]))
                group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("optimizer.train() comes before step()")
            group["updates"] += 1
            weight, share = 1 / group["updates"], group["share"]
            for p in group["params"]:
                fast = self.state[p].setdefault("fast", p.clone())
                p.lerp_(fast, weight).add_(p.grad, alpha=group["lr"] * (share * (1 - weight) - 1))
                fast.sub_(p.grad, alpha=group["lr"])


class ModelEma:
    """An average of the whole state, kept by hand."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for kept, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            kept.copy_(self.decay * kept + (1.0 - self.decay) * value)
