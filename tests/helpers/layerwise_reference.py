"""LARS and LAMB as the design writes them, in NumPy, tensor by tensor: what ours are compared with. Shares no line with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def length(x: Array) -> float:
    return float(np.sqrt(np.sum(np.square(x))))


@dataclass
class LarsTensor:
    """One tensor. local_lr = lr*coeff*|p| / (|g| + wd*|p| + eps);  v = mu*v + local_lr*(g + wd*p);  p -= v."""

    p: Array
    coeff: float
    wd: float
    eps: float = 0.0
    mu: float = 0.9
    decay: bool = True
    adapt: bool = True
    v: Array = field(init=False)
    ratio: float = 1.0

    def __post_init__(self) -> None:
        self.p = np.array(self.p, dtype=np.float64)
        self.v = np.zeros_like(self.p)

    def step(self, g: Array | None, lr: float) -> None:
        if g is None:
            return
        wd = self.wd if self.decay else 0.0
        local_lr = lr
        if self.adapt and length(self.p) > 0 and length(g) > 0:
            local_lr = lr * self.coeff * length(self.p) / (length(g) + wd * length(self.p) + self.eps)
            self.ratio = local_lr / lr if lr else self.ratio
        self.v = self.mu * self.v + local_lr * (g + wd * self.p)
        self.p = self.p - self.v


@dataclass
class LambTensor:
    """One tensor: Adam's direction, corrected for bias, plus wd*p; scaled to lr times the length of p."""

    p: Array
    wd: float
    eps: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    decay: bool = True
    adapt: bool = True
    m: Array = field(init=False)
    s: Array = field(init=False)
    t: int = 0
    ratio: float = 1.0

    def __post_init__(self) -> None:
        self.p = np.array(self.p, dtype=np.float64)
        self.m, self.s = np.zeros_like(self.p), np.zeros_like(self.p)

    def step(self, g: Array | None, lr: float) -> None:
        if g is None:
            return
        self.t += 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.s = b2 * self.s + (1 - b2) * np.square(g)
        corrected_m, corrected_s = self.m / (1 - b1**self.t), self.s / (1 - b2**self.t)
        u = corrected_m / (np.sqrt(corrected_s) + self.eps)
        if self.decay:
            u = u + self.wd * self.p
        self.ratio = 1.0
        if self.adapt and length(self.p) > 0 and length(u) > 0:
            self.ratio = length(self.p) / length(u)
        self.p = self.p - lr * self.ratio * u
