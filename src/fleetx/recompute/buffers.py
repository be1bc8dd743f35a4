"""Snapshot the buffers of a tree of modules before a forward, and put them back for its second run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

SMALL_BYTES = 2**16
"""BufferSnapshot up to this size are always copied."""
Place = tuple[int, str]
"""Index of a module in the tree, and the name of a buffer in it."""


@final
class BufferSnapshot:
    """The buffers as they were before one call."""

    def __init__(self, modules: Sequence[nn.Module], copied: set[Place] | None) -> None:
        """Copy small buffers, and those large ones that the forward may write: the places in `copied`, or all if it is None."""
        self._modules = modules
        self._before = [dict(module._buffers) for module in modules]
        self._copies: dict[int, Tensor] = {}  # by id: one tensor under two names stays one
        self.uncopied: list[Tensor] = []
        for i, (module, before) in enumerate(zip(modules, self._before, strict=True)):
            for name, buffer in before.items():
                if buffer is None or id(buffer) in self._copies:
                    continue
                if copied is None or (i, name) in copied or is_small(buffer) or isinstance(module, _NormBase):
                    self._copies[id(buffer)] = buffer.clone()
                else:
                    self.uncopied.append(buffer)

    def written(self) -> set[Place]:
        """Return the places that a call wrote, after one for which all buffers were copied; drop copies of other large ones.

        Values are compared: torch's norm layers, and writes through `.data`, do not change the tensor's version. That waits
        for a GPU, so call it once."""
        places: set[Place] = set()
        for i, before in enumerate(self._before):
            for name, buffer in before.items():
                if buffer is None or id(buffer) not in self._copies:
                    continue
                if not is_equal(buffer, self._copies[id(buffer)]):
                    places.add((i, name))
                elif not is_small(buffer):
                    del self._copies[id(buffer)]
                    self.uncopied.append(buffer)
        return places

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Run the block with the buffers of the snapshot; writes to them are dropped, and the current ones return afterwards."""
        again = {key: copy.clone() for key, copy in self._copies.items()}  # there may be a third run (retain_graph)
        now = [module._buffers for module in self._modules]
        try:
            for module, before in zip(self._modules, self._before, strict=True):
                vars(module)["_buffers"] = {name: again.get(id(buffer), buffer) for name, buffer in before.items()}
            yield
        finally:
            for module, buffers in zip(self._modules, now, strict=True):
                vars(module)["_buffers"] = buffers


def is_small(buffer: Tensor) -> bool:
    return buffer.numel() * buffer.element_size() <= SMALL_BYTES


def is_equal(one: Tensor, other: Tensor) -> bool:
    return one.layout is torch.strided and torch.equal(one, other)
