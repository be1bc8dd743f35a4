"""Inputs that wait in host memory from forward to backward: the call of a unit parks them, and has them back to run again.

    forward     the copy out begins with the unit and runs beside it; when both are over, the device keeps nothing of the input
    backward    the unit that runs again has its inputs back; those of the unit parked before it begin to come, beside its work

Bytes come and go in fixed places of a step, never "when the copy happens to be over": what is in use can be foretold.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Any, final

import torch
from torch import Tensor

from ..engine.trees import map_leaves, tensors_in
from .host_memory import Mover, Pool
from .memory_probe import storage_of
from .segments import Remembered


def can_be_parked(tensor: Tensor) -> bool:
    """Made by the graph, and all that is in its storage: a part or a view of another tensor would free nothing."""
    if type(tensor) is not Tensor or tensor.grad_fn is None or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if vars(tensor):  # somebody has hung something on it, which a copy would not have
        return False
    if tensor._is_view() or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return False
    storage = storage_of(tensor)
    return storage is not None and storage.nbytes() == tensor.nbytes and is_dense(tensor.shape, tensor.stride())


def is_dense(shape: Collection[int], strides: Collection[int]) -> bool:
    """Each element has a place of its own, and there is no place between them."""
    span = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != span:
            return False
        span *= size
    return True


def bytes_of(tensor: Tensor) -> Tensor:
    """Its storage, whatever is in it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@final
class Copy:
    """Under way. The memory at both ends stays until the device is told to wait for it: used again before, it would be torn."""

    def __init__(self, mover: Mover, target: Tensor, source: Tensor) -> None:
        self._mover = mover
        self._ends: tuple[Tensor, ...] = ()
        self._mark = mover.begin(target, source)
        self._ends = target, source

    def finish(self) -> None:
        if self._ends:
            self._mover.wait(self._mark)
            self._ends = ()

    def __del__(self) -> None:
        self.finish()


@final
class Parked:
    """In the place of an argument: its bytes in host memory. They are there until nobody can ask for it any more."""

    def __init__(self, tensor: Tensor, mover: Mover, pool: Pool) -> None:
        self._mover = mover
        self._of, self._version = weakref.ref(tensor), tensor._version
        self._shape, self._strides, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        buffer = pool.take(tensor.nbytes)
        weakref.finalize(self, pool.give, buffer).atexit = False
        self._buffer = buffer[: tensor.nbytes]
        self._leaving = Copy(mover, self._buffer, bytes_of(tensor))
        self._back: tuple[Tensor, Copy] | None = None

    def is_of(self, tensor: Tensor) -> bool:
        """As it is now: one that was changed since is another."""
        return self._of() is tensor and self._version == tensor._version

    def leave(self) -> None:
        """The device may use the memory for other things, once the copy is over."""
        self._leaving.finish()

    def fetch(self) -> None:
        """Begin to bring it back, if it is not there or on its way."""
        if self._back is None:
            tensor = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._mover.device)
            self._back = tensor, Copy(self._mover, bytes_of(tensor), self._buffer)

    def tensor(self) -> Tensor:
        """To compute with, and still there afterwards."""
        self.fetch()
        assert self._back is not None
        tensor, copy = self._back
        copy.finish()
        leaf = tensor.detach().requires_grad_()
        return leaf.view_as(leaf)  # a view: of a leaf that requires gradients autocast would keep a copy in 16 bits

    def let_go(self) -> None:
        """Of what was brought back."""
        self._back = None


@final
class Stay:
    """What one call of a unit has parked. Its call holds it; `before` is weak, or one step would hold on to the last."""

    def __init__(self, sources: dict[int, tuple[Tensor, Parked]], before: weakref.ref[Stay] | None) -> None:
        self._sources = sources
        self._before = before
        self.parked = [parked for _, parked in sources.values()]

    def settle(self, call: Remembered) -> None:
        """The unit's forward is over: let the call keep what is parked instead of what it was given."""
        sources, self._sources = self._sources, {}
        for parked in self.parked:
            parked.leave()
        if not sources:
            return
        call.arguments = map_leaves(Tensor, lambda t: sources[id(t)][1] if id(t) in sources else t, call.arguments)
        still = {id(tensor) for tensor in tensors_in(call.arguments)}  # a dataclass may refuse to have a field replaced
        stays = [id(tensor) not in sources or id(tensor) in still for tensor in call.unchanging]
        call.unchanging = list(itertools.compress(call.unchanging, stays))
        call.versions = list(itertools.compress(call.versions, stays))

    def parked_before(self) -> list[Parked]:
        before = None if self._before is None else self._before()
        return [] if before is None else before.parked


@final
class Parking:
    """Of all units of one model."""

    def __init__(self, mover: Mover) -> None:
        self._mover, self.pool = mover, Pool(mover.buffer)
        self._known: weakref.WeakValueDictionary[int, Parked] = weakref.WeakValueDictionary()
        """By the tensor's id: one that several units are given is parked once."""
        self._last: weakref.ref[Stay] | None = None
        self._ahead: weakref.WeakSet[Parked] = weakref.WeakSet()
        """Brought back for a unit that has not run yet."""

    def begin(self, arguments: Any, places: Collection[int] | None) -> Stay:
        """A unit is called. `places` of its arguments' tensors, in order, are parked where they can be; None: all."""
        sources: dict[int, tuple[Tensor, Parked]] = {}
        for place, tensor in enumerate(tensors_in(arguments)):
            is_wanted = (places is None or place in places) and id(tensor) not in sources
            if is_wanted and tensor.device == self._mover.device and can_be_parked(tensor):
                sources[id(tensor)] = tensor, self._parked(tensor)
        stay = Stay(sources, self._last)
        if sources:
            self._last = weakref.ref(stay)
        return stay

    def _parked(self, tensor: Tensor) -> Parked:
        known = self._known.get(id(tensor))
        if known is None or not known.is_of(tensor):
            known = self._known[id(tensor)] = Parked(tensor, self._mover, self.pool)
        return known

    def go_on(self, stay: Stay) -> None:
        """A unit runs again, and has taken what it parked: what the one before it has parked begins to come."""
        coming = stay.parked_before()
        for parked in coming:
            parked.fetch()
        for parked in [*stay.parked, *self._ahead]:
            if parked not in coming:
                parked.let_go()
        self._ahead = weakref.WeakSet(coming)


def unparked(arguments: Any) -> Any:
    """With tensors again in the places of those that are parked; where it was one tensor in two places, it is."""
    found: dict[Parked, Tensor] = {}

    def there(parked: Parked) -> Tensor:
        if parked not in found:
            found[parked] = parked.tensor()
        return found[parked]

    return map_leaves(Parked, there, arguments)
