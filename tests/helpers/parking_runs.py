"""Offload without a GPU: movers whose host memory torch does not know of, and that copy as early or as late as they may."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

GARBAGE = 0xAB


class EarlyMover:
    """A copy is over when it begins."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.out = self.back = 0
        """Copies to the host, and from it."""
        self._hosts: set[int] = set()

    def buffer(self, size: int) -> Tensor:
        array = np.full(size, GARBAGE, dtype=np.uint8)
        made = torch.from_numpy(array)
        self._hosts.add(made.data_ptr())
        weakref.finalize(array, self._hosts.discard, made.data_ptr())
        return made

    def begin(self, target: Tensor, source: Tensor) -> Any:
        assert target.dtype == source.dtype == torch.uint8 and target.nbytes == source.nbytes
        is_out = target.data_ptr() in self._hosts
        assert is_out != (source.data_ptr() in self._hosts)
        self.out, self.back = self.out + is_out, self.back + (not is_out)
        return self._begun(target, source, is_out)

    def _begun(self, target: Tensor, source: Tensor, is_out: bool) -> Any:
        target.copy_(source)
        return None

    def wait(self, mark: Any) -> None: ...

    def bytes_per_second(self) -> float:
        return 1e12


class LateMover(EarlyMover):
    """A copy is made when a caller waits for it, or for a later one; until then there is garbage in its place."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._done = 0

    def _begun(self, target: Tensor, source: Tensor, is_out: bool) -> Any:
        if not is_out:
            target.fill_(GARBAGE)
        self._waiting.append((target, source))
        return self._done + len(self._waiting)

    def wait(self, mark: int) -> None:
        while self._done < mark:
            target, source = self._waiting.pop(0)
            target.copy_(source)
            self._done += 1


MOVERS = {"early": EarlyMover, "late": LateMover}


def use_mover(monkeypatch: pytest.MonkeyPatch, mover: Any) -> Any:
    """For all that is distributed from now on."""
    for module in ("fleetx.strategies.recompute", "fleetx.recompute.find_batch"):
        monkeypatch.setattr(f"{module}.mover_for", lambda device: mover, raising=False)
    return mover
