"""Local SGD with compressed deltas and in fragments, in NumPy and float64, which the engine is compared with.

    e_r = decay * e_r + share_r * delta_r;  sent_r = codec(e_r);  e_r -= sent_r;  mean = sum of sent_r

With owners the mean goes through the codec again, part by part, and what that misses is added to the owner's e. Of F fragments
one takes its turn after update begin + j * k // F, j = 1, 2, ... No line is shared with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.helpers.integers_reference import blockwise, to_bfloat16
from tests.helpers.localsgd_reference import Array, Rule, Workers, outer_step

Encode = Callable[[Array], Array]
"""What is received in the place of a row."""


def integers(bits: int, block: int = 256) -> Encode:
    return lambda row: blockwise(row, bits=bits, block=block)[0]


def sparse(top_k: int, chunk: int, value_bits: int) -> Encode:
    """The largest entries of each chunk, one chunk after the other."""

    def received(row: Array) -> Array:
        out = np.zeros_like(row)
        for begin in range(0, len(row), chunk):
            entries = row[begin : begin + chunk]
            taken = -(-top_k * len(entries) // chunk)
            places = np.argsort(-np.abs(entries), kind="stable")[:taken]
            out[begin + places] = _coded(entries[places], value_bits)
        return out

    return received


def _coded(values: Array, bits: int) -> Array:
    if bits == 32:
        return values.astype(np.float32).astype(values.dtype)
    if bits == 2:
        return _of_two_sizes(values)
    largest = {8: 127, 4: 7}[bits]
    scale = to_bfloat16(np.array([np.abs(values).max() / largest]))[0]
    return np.rint(values / scale) * scale if scale >= 2.0**-126 else np.zeros_like(values)


def _of_two_sizes(values: Array) -> Array:
    sizes = np.abs(values)
    above = sizes > sizes.mean()
    high = (sizes[above] if above.any() else sizes).mean()
    low = sizes[~above].mean()
    if not np.float32(high):
        return np.zeros_like(values)
    fraction, exponent = np.frexp(np.float32(high))
    high = float(np.ldexp(np.floor(float(fraction) * 16 + 0.5) / 16, int(exponent)))  # 4 binary digits
    low = high * min(max(np.rint(low / high * 32), 1), 32) / 32
    sent = np.sign(values) * np.where(2 * sizes > low + high, high, low)
    return np.asarray(np.where(2 * sizes < low, 0.0, sent))


@dataclass(frozen=True, kw_only=True)
class Compressed(Rule):
    encode: Encode = lambda row: row
    decay: float = 1.0
    owned: bool = False
    parts: tuple[slice, ...] = (slice(None),)
    """The fragments."""


@dataclass
class Turn:
    launched_at: int
    at: slice
    sent: Array
    target: Array


@dataclass
class CompressedWorkers(Workers):
    rule: Compressed
    turns: int = 0
    flying: Turn | None = None
    kept: Array = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept = np.zeros_like(self.p)
        self.spent = np.zeros((len(self.rule.parts), self.ranks))

    def _average(self, t: int, lr: float) -> None:
        rule = self.rule
        self.spent += self.weight_spent
        self.weight_spent = np.zeros(self.ranks)
        if self.flying is not None and t == self.flying.launched_at + rule.overlap:
            self._settle(self.flying)
        if t == rule.begin + (self.turns + 1) * rule.k // len(rule.parts):
            number, self.turns = self.turns % len(rule.parts), self.turns + 1
            self.flying = self._turn(t, number)
            if rule.overlap == 0:
                self._settle(self.flying)

    def _turn(self, t: int, number: int) -> Turn:
        at, shares = self.rule.parts[number], self.spent[number] / self.spent[number].sum()
        self.spent[number] = 0
        change = self.rule.decay * self.kept[:, at] + shares[:, None] * (self.p - self.anchor)[:, at]
        length = change.shape[1]
        size = -(-length // self.ranks) if self.rule.owned else length
        owned = [slice(begin, begin + size) for begin in range(0, length, size)]
        sent = np.stack([np.concatenate([self.rule.encode(row[part]) for part in owned]) for row in change])
        kept, mean = change - sent, sent.sum(axis=0)
        for owner, part in enumerate(owned if self.rule.owned else []):
            total = mean[part].copy()
            mean[part] = self.rule.encode(total)
            kept[owner, part] += total - mean[part]
        self.kept[:, at] = kept
        target, self.outer_velocity[at] = outer_step(self.anchor[at], mean, self.outer_velocity[at], self.rule)
        return Turn(t, at, self.p[:, at].copy(), target)

    def _settle(self, turn: Turn) -> None:
        self.flying, self.averaged[-1] = None, True
        self.p = self.p.copy()
        self.p[:, turn.at] += turn.target - turn.sent
        self.anchor[turn.at] = turn.target
