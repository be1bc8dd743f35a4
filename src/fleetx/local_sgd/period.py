"""Decide after how many updates to average, from numbers that are equal on all ranks.

fixed      begin + k, begin + 2k, ...
adaptive   AdaComm (Wang and Joshi 2019): the period falls with the loss, and rises when the learning rate falls
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, final

from ..errors import warn_user


def adaptive_period(
    loss: float, lr: float, *, first_loss: float, first_lr: float, first_period: int, most: int, formula: str, now: int
) -> int:
    """Return ceil(sqrt(r) * k0) ("paper") or ceil(sqrt(r * k0)) ("fleet"), r = lr0*loss / (lr*loss0); `now` if that fails."""
    try:
        ratio = (first_lr * loss) / (lr * first_loss)
        root = math.sqrt(ratio * first_period) if formula == "fleet" else math.sqrt(ratio) * first_period
        return min(max(math.ceil(root), 1), most)
    except (ValueError, ZeroDivisionError, OverflowError):  # a root of less than 0, a loss of 0, NaN or infinity
        return now


class Period(Protocol):
    """How many updates lie between two averagings."""

    needs_loss: bool
    now: int
    """Updates between the last averaging and the next."""

    def begin(self, loss: float, lr: float) -> None:
        """Start after the last dense update, with loss and rate equal on every rank."""

    def after_round(self, index: int, loss: float, lr: float) -> str | None:
        """Update `now` from numbers equal on every rank; return a line for the log if it changed, else None."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@final
class FixedPeriod:
    """Average every `updates` updates."""

    needs_loss = False

    def __init__(self, updates: int) -> None:
        self.now = updates

    def begin(self, loss: float, lr: float) -> None:
        return None

    def after_round(self, index: int, loss: float, lr: float) -> str | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


@final
class AdaptivePeriod:
    """Shorten the period as the loss falls, lengthen it as the learning rate falls."""

    needs_loss = True

    def __init__(self, first: int, *, most: int, formula: str, speaks: bool) -> None:
        self._first, self._most, self._formula = min(first, most), most, formula
        self._init = first
        self._speaks = speaks
        """Whether this rank prints warnings: one of all equal ranks does."""
        self.now = self._first
        self._loss, self._lr = math.nan, math.nan
        self._warned = False

    def begin(self, loss: float, lr: float) -> None:
        self.now, self._loss, self._lr = self._first, loss, lr

    def after_round(self, index: int, loss: float, lr: float) -> str | None:
        before = self.now
        self.now = adaptive_period(
            loss,
            lr,
            first_loss=self._loss,
            first_lr=self._lr,
            first_period=self._init,
            most=self._most,
            formula=self._formula,
            now=before,
        )
        self._warn_of_rising(index, lr)
        if self.now == before:
            return None
        return (
            f"adaptive_localsgd: after update {index} the period goes from {before} to {self.now} "
            f"(loss {loss:.4g}, at first {self._loss:.4g}; lr {lr:.4g}, at first {self._lr:.4g})"
        )

    def _warn_of_rising(self, index: int, lr: float) -> None:
        if not self._warned and lr > self._lr:
            self._warned = True
            if self._speaks:
                warn_user(
                    f"adaptive_localsgd: the learning rate at update {index} is {lr:g}, above the {self._lr:g} of "
                    "`begin_step`, so that the period shrinks although the loss need not have fallen yet. "
                    'Put adaptive_localsgd_configs["begin_step"] at the end of the warm-up.',
                )

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now, "loss": self._loss, "lr": self._lr, "warned": self._warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.now, self._warned = int(state["now"]), bool(state["warned"])
        self._loss, self._lr = float(state["loss"]), float(state["lr"])
