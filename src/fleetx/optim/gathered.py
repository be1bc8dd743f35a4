"""Bring together what ranks have computed for each other, in flat pieces that travel while each goes on with its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..dist.comm import Comm, Pending

PIECE_ELEMENTS = 2**22
"""Elements of a piece: 8 MB in bfloat16."""


@final
class Gathered:
    """One stream of numbers for each rank, whose lengths all ranks know; filled by its rank, and gathered piece by piece.

    Every rank starts as many pieces, of one size and in one order, as every other: both follow from the lengths, which follow
    from the shapes of all matrices. What a rank lacks (a gradient, say) leaves zeros in its stream, and changes no collective.
    No rank waits before it has started all of its own pieces, so none waits for a piece that another starts only later."""

    def __init__(self, comm: Comm, lengths: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        longest = max(lengths)
        pieces = -(-longest // PIECE_ELEMENTS)
        self._comm, self._lengths = comm, lengths
        self._size = -(-longest // pieces)
        self._own = torch.zeros(pieces * self._size, dtype=dtype, device=device)
        self._rows = torch.empty(pieces, comm.size, self._size, dtype=dtype, device=device)
        self._filled = 0
        self._started: list[Pending] = []

    def put(self, values: Tensor | None, numel: int) -> None:
        """Write the next numbers of this rank's stream (None: leave zeros), and start the pieces that are full."""
        if values is not None:
            self._own[self._filled :][:numel].view(values.shape).copy_(values)
        self._filled += numel
        while (len(self._started) + 1) * self._size <= self._filled:
            self._start()

    def _start(self) -> None:
        number = len(self._started)
        own = self._own[number * self._size :][: self._size]
        self._started.append(self._comm.all_gather_into(self._rows[number].view(-1), own))

    def start_rest(self) -> None:
        """Start the pieces that are left: some ranks have less to fill them with than others."""
        while len(self._started) < len(self._rows):
            self._start()

    def streams(self) -> list[Tensor]:
        """Wait for all pieces, and return the streams of all ranks."""
        for pending in self._started:
            pending.wait()
        return [self._rows[:, rank].reshape(-1)[:length] for rank, length in enumerate(self._lengths)]
