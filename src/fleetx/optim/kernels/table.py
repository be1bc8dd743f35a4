"""The table that tells a kernel where things are, kept on the device and sent again when something has moved.

Nothing waits: the host writes page-locked memory that torch's allocator keeps until the copy is done. A CUDA graph replays
its copies later, from the same memory: that memory is then the graph's, made beforehand and never written again.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError

SPARES = 2


@final
class Table:
    """Integers of 64 bits, written on the host in `words`."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self.words = np.zeros(count, dtype=np.int64)
        self._live = torch.zeros(count, dtype=torch.int64, device=device)
        self._spares: list[Tensor] = []
        self._of_graphs: list[Tensor] = []
        self._is_behind = False
        """What changed while a graph was captured is in the graph's copy alone."""
        self.copies = 0
        """Made so far, outside graphs."""

    def on_device(self, *, changed: bool) -> Tensor:
        """The words on the device; `changed`: since the last call."""
        if self._device.type != "cuda":
            return self._live.copy_(torch.from_numpy(self.words)) if changed else self._live
        self._is_behind |= changed
        if torch.cuda.is_current_stream_capturing():
            return self._in_graph()
        if self._is_behind:
            self._is_behind = False
            host = torch.empty(self._live.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            host.numpy()[:] = self.words
            self._live.copy_(host, non_blocking=True)
            self.copies += 1
        while len(self._spares) < SPARES:
            self._spares.append(torch.empty(self._live.shape, dtype=torch.int64, device="cpu", pin_memory=True))
        return self._live

    def _in_graph(self) -> Tensor:
        if not self._spares:
            raise ConfigError("capture one optimizer step per graph, and run one uncaptured step before each capture.")
        host = self._spares.pop()
        host.numpy()[:] = self.words
        self._of_graphs.append(host)
        return torch.empty_like(self._live).copy_(host, non_blocking=True)
