"""The buffers of a tree of modules before a forward that may write them, put back for its second run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

SMALL_BYTES = 2**16
Place = tuple[int, str]
"""Which module of the tree, and the name of a buffer in it."""


@final
class Buffers:
    """As they were before one call."""

    def __init__(self, modules: Sequence[nn.Module], copied: set[Place] | None) -> None:
        """`copied`: which large ones are, for they may be written; None: all."""
        self._modules = modules
        self._then = [dict(module._buffers) for module in modules]
        self._copies: dict[int, Tensor] = {}  # by id: one tensor under two names stays one
        self.uncopied: list[Tensor] = []
        for i, (module, then) in enumerate(zip(modules, self._then, strict=True)):
            for name, buffer in then.items():
                if buffer is None or id(buffer) in self._copies:
                    continue
                if copied is None or (i, name) in copied or is_small(buffer) or isinstance(module, _NormBase):
                    self._copies[id(buffer)] = buffer.clone()
                else:
                    self.uncopied.append(buffer)

    def written(self) -> set[Place]:
        """After a call for which all were copied: the places that it wrote. Of the others, copies of large ones are given up.

        By value: torch's norm layers, and who writes through `.data`, do so without a change of the tensor's version. It
        waits for a GPU, so ask once."""
        found: set[Place] = set()
        for i, then in enumerate(self._then):
            for name, buffer in then.items():
                if buffer is None or id(buffer) not in self._copies:
                    continue
                if not is_equal(buffer, self._copies[id(buffer)]):
                    found.add((i, name))
                elif not is_small(buffer):
                    del self._copies[id(buffer)]
                    self.uncopied.append(buffer)
        return found

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """What is written, replaced or made meanwhile goes with them; those of now are there again afterwards."""
        again = {key: copy.clone() for key, copy in self._copies.items()}  # there may be a third run (retain_graph)
        now = [module._buffers for module in self._modules]
        try:
            for module, then in zip(self._modules, self._then, strict=True):
                vars(module)["_buffers"] = {name: again.get(id(buffer), buffer) for name, buffer in then.items()}
            yield
        finally:
            for module, buffers in zip(self._modules, now, strict=True):
                vars(module)["_buffers"] = buffers


def is_small(buffer: Tensor) -> bool:
    return buffer.numel() * buffer.element_size() <= SMALL_BYTES


def is_equal(one: Tensor, other: Tensor) -> bool:
    return one.layout is torch.strided and torch.equal(one, other)
