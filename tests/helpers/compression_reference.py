"""DGC and PowerSGD as they are defined, in NumPy: what the engine is compared with. Shares no line with it.

Updates are counted from 1. A rank's share is its part of the mean: gradient/N, or weighted as the user says; shares add up.

    DGC         g = share + decay*p/N;  u = m*u + g;  v = v + u  (nesterov: v + g + m*u)
                the k largest |v| of a tensor are sent, of equal ones the first; there u = v = 0;  p -= lr * sum of what was sent
    PowerSGD    M = share + error;  P = basis of sum(M Q);  Q = sum(M' P);  gradient = P Q';  error = M - P (own M' P)'

Both in the type of the arrays they are given: float64 for the maths, float32 where bits are replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = list[Array]
"""One row for each tensor of a model."""


def sparsity_at(update: int, *, begin: int, ramp: int, sparsity: tuple[float, ...]) -> float:
    """Of an update, counted from 1; 0 is dense."""
    if update <= begin:
        return 0.0
    return sparsity[min((update - 1 - begin) * len(sparsity) // ramp, len(sparsity) - 1)]


def sent_count(numel: int, sparsity: float) -> int:
    """In the decimals that the user wrote, and not in their binary neighbours."""
    return max(1, floor(numel * (1 - Fraction(str(sparsity)))))


def largest_places(row: Array, count: int) -> Array:
    """A stable sort, and nothing else."""
    return np.sort(np.argsort(-np.abs(row), kind="stable")[:count])


def sum_in_order(rows: list[Array]) -> Array:
    total = np.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


# --- DGC ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rule:
    begin: int = 0
    ramp: int = 1
    sparsity: tuple[float, ...] = (0.999,)
    min_numel: int = 1
    clip: float | None = None
    nesterov: bool = False
    decay: float = 0.0


@dataclass
class DGCWorkers:
    """All ranks of a run; `step` is one update of each."""

    start: Tensors
    ranks: int
    rule: Rule
    weights: list[Array] = field(default_factory=list)
    """After each update, all tensors in one row; likewise v and u, one row for each rank."""
    unsent: list[Array] = field(default_factory=list)
    momenta: list[Array] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """How many numbers a rank sent in each update."""

    def __post_init__(self) -> None:
        self.p = [row.copy() for row in self.start]
        self.buffers = [np.zeros_like(row) for row in self.start]
        self.u = [[np.zeros_like(row) for row in self.start] for _ in range(self.ranks)]
        self.v = [[np.zeros_like(row) for row in self.start] for _ in range(self.ranks)]
        self.begun = False

    def step(self, update: int, shares: list[Tensors], *, lr: float, momentum: float, used: list[bool] | None = None) -> None:
        rule = self.rule
        sparsity = sparsity_at(update, begin=rule.begin, ramp=rule.ramp, sparsity=rule.sparsity)
        if sparsity > 0 and rule.clip is not None:
            shares = [self._clipped(share, rule.clip) for share in shares]
        large = [row.size >= rule.min_numel for row in self.p]
        if sparsity > 0 and not self.begun:
            self._begin(large)
        sent = 0
        for i, is_large in enumerate(large):
            if sparsity > 0 and is_large:
                sent += self._sparse(i, [share[i] for share in shares], sparsity, lr=lr, momentum=momentum)
            else:
                sent += self.p[i].size
                if used is None or used[i]:
                    self._dense(i, sum_in_order([share[i] for share in shares]), lr=lr, momentum=momentum)
        self.sent.append(sent)
        self.weights.append(np.concatenate(self.p))
        self.unsent.append(np.stack([np.concatenate(rows) for rows in self.v]))
        self.momenta.append(np.stack([np.concatenate(rows) for rows in self.u]))

    def _clipped(self, share: Tensors, clip: float) -> Tensors:
        whole = np.concatenate(share) * self.ranks
        most = clip * self.ranks**-0.5
        length = float(np.sqrt(np.sum(whole**2)))
        return [row * min(1.0, most / length) for row in share] if length > 0 else share

    def _begin(self, large: list[bool]) -> None:
        """The momentum that all have alike becomes each rank's share of it."""
        self.begun = True
        for rank in range(self.ranks):
            for i, is_large in enumerate(large):
                if is_large:
                    self.u[rank][i] = self.buffers[i] / self.ranks

    def _dense(self, i: int, g: Array, *, lr: float, momentum: float) -> None:
        """torch.optim.SGD."""
        if self.rule.decay:
            g = g + self.rule.decay * self.p[i]
        self.buffers[i] = self.buffers[i] * momentum + g
        direction = g + momentum * self.buffers[i] if self.rule.nesterov else self.buffers[i]
        self.p[i] = self.p[i] - lr * direction

    def _sparse(self, i: int, shares: list[Array], sparsity: float, *, lr: float, momentum: float) -> int:
        count = sent_count(self.p[i].size, sparsity)
        total = np.zeros_like(self.p[i])
        for rank, g in enumerate(shares):
            if self.rule.decay:
                g = g + self.rule.decay * self.p[i] / self.ranks
            u = self.u[rank][i] * momentum + g
            v = self.v[rank][i] + (g + momentum * u if self.rule.nesterov else u)
            places = largest_places(v, count)
            total[places] = total[places] + v[places]
            u[places] = v[places] = 0.0
            self.u[rank][i], self.v[rank][i] = u, v
        self.p[i] = self.p[i] - lr * total
        return count


# --- PowerSGD -----------------------------------------------------------------------------------------------------------


def is_compressed(shape: tuple[int, ...], *, rank: int, min_compression: float) -> bool:
    n, m = shape[0], int(np.prod(shape[1:]))
    return (n + m) * rank * min_compression < n * m


def basis_of(matrix: Array) -> Array:
    """Orthonormal, of the columns' span. By singular vectors: which basis it is does not matter to P Q'."""
    return np.linalg.svd(matrix, full_matrices=False)[0]


@dataclass
class PowerMatrix:
    """One compressed tensor on all ranks, from a known Q and known errors on."""

    right: Array
    errors: list[Array]

    def reduced(self, shares: list[Array]) -> Array:
        matrices = [share + error for share, error in zip(shares, self.errors, strict=True)]
        left = basis_of(sum_in_order([matrix @ self.right for matrix in matrices]))
        own = [matrix.T @ left for matrix in matrices]
        self.right = sum_in_order(own)
        self.errors = [matrix - left @ mine.T for matrix, mine in zip(matrices, own, strict=True)]
        return np.asarray(left @ self.right.T)
