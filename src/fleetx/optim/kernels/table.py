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
    """`words` integers of 64 bits on a device."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._words, self._device = words, device
        self._live = torch.zeros(words, dtype=torch.int64, device=device)
        self._sent: np.ndarray | None = None
        self._spares: list[Tensor] = []
        self._of_graphs: list[Tensor] = []
        self.sent = 0
        """Copies made so far."""

    def send(self, words: np.ndarray) -> Tensor:
        """The table with these words, on the device. The same array means the same words."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._send_in_graph(words)
        if words is not self._sent:
            self._sent = words
            self._live.copy_(self._page_locked(words), non_blocking=True)
            self.sent += 1
        while self._device.type == "cuda" and len(self._spares) < SPARES:
            self._spares.append(torch.empty(self._words, dtype=torch.int64, pin_memory=True))
        return self._live

    def _page_locked(self, words: np.ndarray) -> Tensor:
        if self._device.type != "cuda":
            return torch.from_numpy(words.copy())
        host = torch.empty(self._words, dtype=torch.int64, pin_memory=True)
        host.numpy()[:] = words
        return host

    def _send_in_graph(self, words: np.ndarray) -> Tensor:
        if not self._spares:
            raise ConfigError("capture one optimizer step per graph, and run one uncaptured step before each capture.")
        host = self._spares.pop()
        host.numpy()[:] = words
        self._of_graphs.append(host)
        return torch.empty_like(self._live).copy_(host, non_blocking=True)
