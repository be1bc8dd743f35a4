"""Keep inputs of units in host memory from forward to backward: a unit's call offloads them, and fetches them to run again.

    forward     the copy out begins with the unit and runs beside it; when both are over, the device keeps nothing of the input
    backward    the unit that runs again has its inputs back; those of the unit offloaded before it are fetched beside its work

Memory is freed and allocated at fixed places of a step, never "when the copy happens to be over", so that it can be predicted.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Any, final

import torch
from torch import Tensor

from ..engine.modules.nested_tensors import map_leaves, tensors_in
from .host_memory import Mover, Pool
from .memory_probe import storage_of
from .segments import RecordedCall


def is_offloadable(tensor: Tensor) -> bool:
    """Return whether offloading frees memory: the graph made the tensor, and it is alone in its storage, not a view or part."""
    if type(tensor) is not Tensor or tensor.grad_fn is None or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if vars(tensor):  # attributes set on the tensor, which a copy would not have
        return False
    if tensor._is_view() or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return False
    storage = storage_of(tensor)
    return storage is not None and storage.nbytes() == tensor.nbytes and is_dense(tensor.shape, tensor.stride())


def is_dense(shape: Collection[int], strides: Collection[int]) -> bool:
    """Return whether elements have distinct places in memory, without gaps."""
    span = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != span:
            return False
        span *= size
    return True


def bytes_of(tensor: Tensor) -> Tensor:
    """View a tensor's whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@final
class Copy:
    """A copy under way. It references the memory at both ends until the device waits for it, so that none is reused too early."""

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
class OffloadedTensor:
    """Stands in for an argument whose bytes are in host memory; the buffer is returned to the pool with this object."""

    def __init__(self, tensor: Tensor, mover: Mover, pool: Pool) -> None:
        self._mover = mover
        self._of, self._version = weakref.ref(tensor), tensor._version
        self._shape, self._strides, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        buffer = pool.take(tensor.nbytes)
        weakref.finalize(self, pool.give, buffer).atexit = False
        self._buffer = buffer[: tensor.nbytes]
        self._copy_out = Copy(mover, self._buffer, bytes_of(tensor))
        self._copy_back: tuple[Tensor, Copy] | None = None

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether this holds the tensor's present values: it must not have been changed since."""
        return self._of() is tensor and self._version == tensor._version

    def release(self) -> None:
        """Let the device reuse the memory once the copy is over."""
        self._copy_out.finish()

    def fetch(self) -> None:
        """Begin to copy it back, if that has not begun."""
        if self._copy_back is None:
            tensor = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._mover.device)
            self._copy_back = tensor, Copy(self._mover, bytes_of(tensor), self._buffer)

    def tensor(self) -> Tensor:
        """Return the tensor to compute with; the host's copy stays valid."""
        self.fetch()
        assert self._copy_back is not None
        tensor, copy = self._copy_back
        copy.finish()
        leaf = tensor.detach().requires_grad_()
        return leaf.view_as(leaf)  # a view: of a leaf that requires gradients autocast would keep a copy in 16 bits

    def drop_copy(self) -> None:
        """Drop what was copied back to the device."""
        self._copy_back = None


@final
class CallOffload:
    """What one call of a unit has offloaded. The call owns it; `before` is weak, or each step would keep the last one alive."""

    def __init__(self, sources: dict[int, tuple[Tensor, OffloadedTensor]], before: weakref.ref[CallOffload] | None) -> None:
        self._sources = sources
        self._before = before
        self.tensors = [offloaded for _, offloaded in sources.values()]

    def settle(self, call: RecordedCall) -> None:
        """Let the call keep what was offloaded instead of its arguments, once the unit's forward is over."""
        sources, self._sources = self._sources, {}
        for offloaded in self.tensors:
            offloaded.release()
        if not sources:
            return
        call.arguments = map_leaves(Tensor, lambda t: sources[id(t)][1] if id(t) in sources else t, call.arguments)
        still = {id(tensor) for tensor in tensors_in(call.arguments)}  # a dataclass may not allow replacing a field
        remains = [id(tensor) not in sources or id(tensor) in still for tensor in call.unchanging]
        call.unchanging = list(itertools.compress(call.unchanging, remains))
        call.versions = list(itertools.compress(call.versions, remains))

    def offloaded_before(self) -> list[OffloadedTensor]:
        """Return what the unit before has offloaded; empty where its call is gone."""
        before = None if self._before is None else self._before()
        return [] if before is None else before.tensors


@final
class Offload:
    """Offloads the inputs of all units of one model."""

    def __init__(self, mover: Mover) -> None:
        self._mover, self.pool = mover, Pool(mover.buffer)
        self._known: weakref.WeakValueDictionary[int, OffloadedTensor] = weakref.WeakValueDictionary()
        """Offloaded tensors by the id of the original: a tensor that several units receive is offloaded once."""
        self._last: weakref.ref[CallOffload] | None = None
        """The last call that has offloaded anything."""
        self._fetched_ahead: weakref.WeakSet[OffloadedTensor] = weakref.WeakSet()
        """Tensors fetched for a unit that has not run again yet."""

    def begin(self, arguments: Any, places: Collection[int] | None) -> CallOffload:
        """Begin to offload the arguments of a unit's call: those of its tensors at `places`, in order, that can be; None: all."""
        sources: dict[int, tuple[Tensor, OffloadedTensor]] = {}
        for place, tensor in enumerate(tensors_in(arguments)):
            is_wanted = (places is None or place in places) and id(tensor) not in sources
            if is_wanted and tensor.device == self._mover.device and is_offloadable(tensor):
                sources[id(tensor)] = tensor, self._offload(tensor)
        call_offload = CallOffload(sources, self._last)
        if sources:
            self._last = weakref.ref(call_offload)
        return call_offload

    def _offload(self, tensor: Tensor) -> OffloadedTensor:
        known = self._known.get(id(tensor))
        if known is None or not known.is_of(tensor):
            known = self._known[id(tensor)] = OffloadedTensor(tensor, self._mover, self.pool)
        return known

    def advance(self, call_offload: CallOffload) -> None:
        """Begin to fetch the inputs of the unit before, once a unit that runs again has its own."""
        upcoming = call_offload.offloaded_before()
        for offloaded in upcoming:
            offloaded.fetch()
        for offloaded in [*call_offload.tensors, *self._fetched_ahead]:
            if offloaded not in upcoming:
                offloaded.drop_copy()
        self._fetched_ahead = weakref.WeakSet(upcoming)


def restored(arguments: Any) -> Any:
    """Return the arguments with their tensors on the device again; one tensor in two places stays one."""
    tensors: dict[OffloadedTensor, Tensor] = {}

    def fetched(offloaded: OffloadedTensor) -> Tensor:
        if offloaded not in tensors:
            tensors[offloaded] = offloaded.tensor()
        return tensors[offloaded]

    return map_leaves(OffloadedTensor, fetched, arguments)
