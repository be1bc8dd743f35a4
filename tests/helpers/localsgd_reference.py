"""Local SGD as it is defined, in NumPy and float64: what the engine is compared with. Shares no line with it.

Updates are counted from 1. Up to `begin` the gradients are averaged; then each rank goes its own way from the common weights,
the anchor, and a round every so many updates brings them together:

    delta_r = p_r - anchor;  g = -mean(delta_r);  m = mu*m + g;  anchor -= lr * (g + mu*m, or m)

A round launched after update t is applied after update t + overlap: p_r += new anchor - p_r(t). One inside a node, where links
are fast, is applied at once: p_r = anchor + mean(delta_r) over the ranks of the node; the anchor stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gradient = Callable[[int, int, Array], tuple[float, Array]]
"""(rank, update, weights) -> loss and gradient."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    k: int = 1
    begin: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    overlap: int = 0
    nodes: tuple[int, ...] | None = None
    """The node of each rank; None: all on one."""
    across_every: int = 1
    """Of so many rounds one is among all ranks, the others inside each node."""
    formula: str | None = None
    """How k follows loss and learning rate; None: it does not. `k` is then the first."""
    max_k: int = 16
    max_norm: float | None = None
    """Gradients longer than this are shortened to it: the mean while dense, then each rank's own."""


def outer_step(anchor: Array, mean_delta: Array, velocity: Array, rule: Rule) -> tuple[Array, Array]:
    """torch.optim.SGD on the pseudo-gradient; the new anchor and the new velocity."""
    g = -mean_delta
    velocity = rule.outer_momentum * velocity + g
    direction = g + rule.outer_momentum * velocity if rule.nesterov else velocity
    return anchor - rule.outer_lr * direction, velocity


def unrounded_period(rule: Rule, *, loss: float, first_loss: float, lr: float, first_lr: float) -> float:
    ratio = first_lr * loss / (lr * first_loss)
    return math.sqrt(ratio) * rule.k if rule.formula == "paper" else math.sqrt(ratio * rule.k)


def clamped(k: float, rule: Rule) -> int:
    return min(max(math.ceil(k), 1), rule.max_k)


def weighted_mean(rows: Array, weights: Array) -> Array:
    return np.asarray((weights[:, None] * rows).sum(axis=0) / weights.sum())


def shortened(rows: Array, max_norm: float) -> Array:
    lengths = np.sqrt(np.sum(rows**2, axis=1, keepdims=True))
    return np.asarray(rows * np.minimum(1.0, max_norm / lengths))


@dataclass
class Round:
    launched_at: int
    sent: Array
    """Each rank's weights then."""
    target: Array
    """What each of them was to become."""
    is_global: bool


@dataclass
class Workers:
    """All ranks of a run; `step` is one update of each."""

    start: Array
    ranks: int
    rule: Rule
    momentum: float = 0.0
    p: Array = field(init=False)
    history: list[Array] = field(default_factory=list)
    """After each update, one row for each rank."""
    averaged: list[bool] = field(default_factory=list)
    """Whether a round among all ranks was applied after it."""
    periods: list[int | None] = field(default_factory=list)
    """The period in force from then on; None while the next update is dense."""
    unrounded: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.p = np.tile(np.asarray(self.start, dtype=np.float64), (self.ranks, 1))
        self.inner_velocity = np.zeros_like(self.p)
        self.anchor, self.outer_velocity = np.array(self.start, dtype=np.float64), np.zeros_like(self.start)
        self.period = self.rule.k if self.rule.formula is None else clamped(self.rule.k, self.rule)
        self.next_round = self.rule.begin + self.period
        self.rounds = 0
        self.under_way: Round | None = None
        self.smoothed: Array | None = None
        self.first = (math.nan, math.nan)
        self.weight_spent = np.zeros(self.ranks)

    def step(self, t: int, gradients: Array, losses: Array, weights: Array, lr: float) -> None:
        dense = t <= self.rule.begin
        if dense:
            gradients = np.tile(weighted_mean(gradients, weights), (self.ranks, 1))
        if self.rule.max_norm is not None:
            gradients = shortened(gradients, self.rule.max_norm)
        self.inner_velocity = self.momentum * self.inner_velocity + gradients
        self.p = self.p - lr * self.inner_velocity
        self.smoothed = losses if self.smoothed is None else 0.9 * self.smoothed + 0.1 * losses
        self.averaged.append(False)
        if t == self.rule.begin:
            self.anchor, self.first = self.p[0].copy(), (float(self.smoothed.mean()), lr)
        elif not dense:
            self.weight_spent += weights
            self._average(t, lr)
        self.periods.append(self.period if t >= self.rule.begin else None)
        self.history.append(self.p.copy())

    def _average(self, t: int, lr: float) -> None:
        if self.under_way is not None and t == self.under_way.launched_at + self.rule.overlap:
            self._apply()
        if t == self.next_round:
            self.under_way = self._launched(t)
            if self.rule.overlap == 0 or not self.under_way.is_global:
                self._apply()
            self._adapt(lr)
            self.next_round = max(t + self.period, t + self.rule.overlap)

    def _launched(self, t: int) -> Round:
        self.rounds += 1
        is_global = self.rounds % self.rule.across_every == 0
        deltas, nodes = self.p - self.anchor, np.array(self.rule.nodes or [0] * self.ranks)
        target = np.empty_like(self.p)
        if is_global:
            mean = weighted_mean(deltas, self.weight_spent)
            target[:], self.outer_velocity = outer_step(self.anchor, mean, self.outer_velocity, self.rule)
        else:
            for node in set(nodes.tolist()):
                here = nodes == node
                target[here] = self.anchor + weighted_mean(deltas[here], self.weight_spent[here])
        self.weight_spent = np.zeros(self.ranks)
        return Round(t, self.p.copy(), target, is_global)

    def _apply(self) -> None:
        assert self.under_way is not None
        arrived, self.under_way = self.under_way, None
        moved_on = self.rule.overlap > 0 and arrived.is_global
        self.p = self.p + (arrived.target - arrived.sent) if moved_on else arrived.target.copy()
        if arrived.is_global:
            self.anchor = arrived.target[0].copy()
            self.averaged[-1] = True

    def _adapt(self, lr: float) -> None:
        if self.rule.formula is None or self.smoothed is None:
            return
        (first_loss, first_lr), loss = self.first, float(self.smoothed.mean())
        if not all(math.isfinite(x) and x > 0 for x in (loss, first_loss, lr, first_lr)):
            return
        self.unrounded.append(unrounded_period(self.rule, loss=loss, first_loss=first_loss, lr=lr, first_lr=first_lr))
        self.period = clamped(self.unrounded[-1], self.rule)


def simulate(
    start: Array,
    gradient: Gradient,
    rule: Rule,
    *,
    ranks: int,
    updates: int,
    lr: Callable[[int], float],
    momentum: float = 0.0,
    weight: Callable[[int, int], float] = lambda rank, update: 1.0,
    make: type[Workers] = Workers,
) -> Workers:
    workers = make(start, ranks, rule, momentum)
    for t in range(1, updates + 1):
        told = [gradient(rank, t, workers.p[rank]) for rank in range(ranks)]
        losses, gradients = np.array([loss for loss, _ in told]), np.stack([g for _, g in told])
        workers.step(t, gradients, losses, np.array([weight(rank, t) for rank in range(ranks)]), lr(t))
    return workers


# --- a net small enough to derive by hand -------------------------------------------------------------------------------

SHAPES = ((4, 3), (4,), (2, 4), (2,))
"""Weight and bias of two layers: 3 inputs, 4 hidden units, 2 outputs."""


def unflatten(flat: Array) -> list[Array]:
    ends = np.cumsum([math.prod(shape) for shape in SHAPES])[:-1]
    return [piece.reshape(shape) for piece, shape in zip(np.split(flat, ends), SHAPES, strict=True)]


def net_gradient(flat: Array, x: Array, y: Array) -> tuple[float, Array]:
    """Mean squared error of W2 tanh(W1 x + b1) + b2, and its gradient."""
    w1, b1, w2, b2 = unflatten(flat)
    hidden = np.tanh(x @ w1.T + b1)
    error = hidden @ w2.T + b2 - y
    d_out = 2.0 * error / error.size
    d_hidden = (d_out @ w2) * (1.0 - hidden**2)
    pieces = (d_hidden.T @ x, d_hidden.sum(axis=0), d_out.T @ hidden, d_out.sum(axis=0))
    return float(np.mean(error**2)), np.concatenate([piece.ravel() for piece in pieces])
