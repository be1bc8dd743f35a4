"""How a round is sent: the type or the codec of the deltas, when it is settled, and with which ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class WireCodec(Protocol):
    """Makes bytes of a row of floats, and takes from the row what they hold."""

    def nbytes(self, numel: int) -> int: ...
    def encode(self, row: Tensor, wire: Tensor, *, kept: Tensor | None = None) -> None: ...
    def add_decoded(self, wire: Tensor, out: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Wire:
    """How a round is sent."""

    dtype: torch.dtype = torch.float32
    """Type of the deltas on the wire; float32 stands for the type in which averages are kept."""
    codec: WireCodec | None = None
    """What makes bytes of them instead, of which the rest is kept for the next round; None: they travel as `dtype`."""
    sums_grow: bool = False
    """Whether a sum of several ranks' deltas would need more bytes than one of them: entries that are not the same places."""
    error_decay: float = 1.0
    """What is left of the kept rest one round later."""
    overlap_steps: int = 0
    """Updates between launch and settling; 0: training waits for the round."""
    across_nodes_every: int = 1
    """Every so many rounds include all ranks, the others those of a node; 1: all of them."""
    fragments: int = 1
    """Parts of the model that are averaged in turns."""
