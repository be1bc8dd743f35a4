"""The weights of a model as a few flat pieces, each sent by one collective, and what an averaging keeps of each.

Of a 16-bit parameter whose optimizer trains a float32 copy (`master` in its state), that copy is what is averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from ..bucket import view_like
from ..comm import Comm, Pending
from ..layout import bucket_runs
from .outer import OuterRule, outer_step

PIECE_BYTES = 32 * 2**20
"""While one piece travels the next is made ready. Smaller ones would be latency, larger ones would wait for each other."""
Master = Callable[[Tensor], Tensor | None]
"""The float32 copy of a parameter that its optimizer keeps, if any."""


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which a parameter's averages are kept and added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@final
class Piece:
    """Some parameters of one type, flat."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], rule: OuterRule) -> None:
        self.names = [name for name, _ in named]
        self.params: list[Tensor] = [param for _, param in named]
        self._rule = rule
        self.anchor = self._new_flat()
        self.velocity = self._new_flat() if rule.momentum else None
        self.mean = self._new_flat()
        """Scratch: a delta on its way out, the mean delta when it is back."""
        self.sent: Tensor | None = None
        """The weights when the round under way was launched."""
        self._narrow: Tensor | None = None

    def _new_flat(self) -> Tensor:
        first = self.params[0]
        numel = sum(p.numel() for p in self.params)
        return torch.zeros(numel, dtype=wide_type(first.dtype), device=first.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.params])
        return [view_like(part, param) for part, param in zip(parts, self.params, strict=True)]

    def by_name(self, flat: Tensor | None) -> dict[str, Tensor] | None:
        return None if flat is None else dict(zip(self.names, self.views(flat), strict=True))

    def put(self, flat: Tensor, named: Mapping[str, Tensor]) -> None:
        torch._foreach_copy_(self.views(flat), [named[name].to(flat.device) for name in self.names])

    def weights(self, master: Master) -> list[Tensor]:
        return [copy if (copy := master(param)) is not None else param.detach() for param in self.params]

    def read(self, flat: Tensor, master: Master) -> None:
        torch._foreach_copy_(self.views(flat), self.weights(master))

    def write(self, flat: Tensor, master: Master) -> None:
        """Into the weights; 16-bit parameters follow their copies."""
        views = self.views(flat)
        torch._foreach_copy_(self.params, views)
        copies = [(copy, view) for param, view in zip(self.params, views, strict=True) if (copy := master(param)) is not None]
        if copies:
            torch._foreach_copy_([copy for copy, _ in copies], [view for _, view in copies])

    # --- one round ----------------------------------------------------------------------------------------------

    def launch(self, share: float, comm: Comm, wire_dtype: torch.dtype, master: Master, *, keeps_sent: bool) -> Pending:
        """Send this rank's delta. The weights may go on changing at once."""
        self.read(self.mean, master)
        if keeps_sent:
            self.sent = self.mean.clone()
        self.mean.sub_(self.anchor).mul_(share)  # before the cast: a sum of 16-bit numbers must not overflow
        if wire_dtype == torch.float32:  # the usual: in the type in which averages are kept, float64 for float64 weights
            return comm.all_reduce(self.mean)
        if self._narrow is None:
            self._narrow = torch.empty_like(self.mean, dtype=wire_dtype)
        narrow = self._narrow.copy_(self.mean)

        def widen() -> None:
            self.mean.copy_(narrow)

        return comm.all_reduce(narrow).then(widen)

    def settle(self, master: Master) -> None:
        """The mean is here: take the outer step, and give the weights what it found."""
        outer_step(self.anchor, self.mean, self.velocity, self._rule)
        self._give(self.anchor, master)

    def settle_inside(self, master: Master) -> None:
        """The mean of this node's ranks: the anchor, which all ranks share, stays."""
        self._give(self.mean.add_(self.anchor), master)

    def _give(self, average: Tensor, master: Master) -> None:
        if self.sent is None:
            return self.write(average, master)
        # What this rank has learnt since it sent its delta is its own, and is kept on top of the average.
        now = torch.empty_like(average)
        self.read(now, master)
        self.write(now.add_(average.sub(self.sent)), master)
        self.sent = None
        return None


def pieces_of(params: Mapping[str, nn.Parameter], rule: OuterRule) -> list[Piece]:
    return [Piece(run, rule) for run in bucket_runs(list(params.items()), bucket_bytes=PIECE_BYTES)]


def take_anchors(pieces: Iterable[Piece], master: Master) -> None:
    """From now on deltas are counted from the weights as they are; all ranks have the same."""
    for piece in pieces:
        piece.read(piece.anchor, master)
