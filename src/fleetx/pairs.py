"""The pairs of model and optimizer that live side by side, and a backward that stays within one of them."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from .errors import ConfigError
from .graph import leaves


class Pair(Protocol):
    param_ids: set[int]

    @property
    def averages(self) -> bool:
        """Its weights may differ from rank to rank, now or later in the run."""


_alive: weakref.WeakSet[Pair] = weakref.WeakSet()


def enlist(pair: Pair) -> None:
    _alive.add(pair)


def dismiss(pair: Pair) -> None:
    """It trains nothing any more, whoever still holds it."""
    _alive.discard(pair)


def owner_of(param: Tensor) -> Pair | None:
    """The pair that trains this parameter. A discarded pair owns nothing."""
    return next((pair for pair in _alive if id(param) in pair.param_ids), None)


def run_backward(pair: Pair, loss: Tensor, seed: float, *, retain_graph: bool) -> None:
    gradient = None if seed == 1.0 else torch.full_like(loss, seed)
    if len(_alive) == 1:
        loss.backward(gradient, retain_graph=retain_graph)
        return
    others = {i for other in _alive if other is not pair for i in other.param_ids}
    # A GAN's generator loss runs through the discriminator: that pair's gradients and window are not ours to touch.
    inputs = [leaf for leaf in leaves(loss) if id(leaf) not in others]
    if not inputs:
        raise ConfigError("this loss depends on no parameter of this optimizer's model, only on another pair's.")
    loss.backward(gradient, retain_graph=retain_graph, inputs=inputs)
