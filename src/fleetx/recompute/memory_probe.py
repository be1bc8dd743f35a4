"""How many bytes a step has in use: a GPU's allocator knows; on a CPU every tensor that an operation makes is counted.

Counted are storages, once each, however many tensors share one. Workspaces inside a CPU kernel are not seen.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..engine.trees import tensors_in


class Gauge(Protocol):
    """Bytes in use, all of them: also those from before the step."""

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Around a step that is to be measured."""

    def now(self) -> int: ...
    def peak(self) -> int:
        """The most since the last call of this or of `watching`: what follows is counted anew."""

    def reserved(self) -> int:
        """The most bytes that the allocator held since `watching` began; as many as were in use, where none holds more."""


def gauge_for(device: torch.device, tensors: Callable[[], Iterable[Tensor]]) -> Gauge:
    """`tensors`: those that live beyond a step, for a device whose allocator does not count."""
    return AllocatorGauge(device) if device.type == "cuda" else CountingGauge(tensors)


@final
class AllocatorGauge:
    """Of torch's allocator on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._most_reserved = device, 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        gc.collect()  # what is in a circle would be counted, or go in the middle
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # or what an earlier step has left would be counted as held
        torch.cuda.reset_peak_memory_stats(self._device)
        self._most_reserved = 0
        yield

    def now(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        # Without waiting for the GPU: memory is handed out and taken back when kernels are launched, not when they run.
        statistics = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._most_reserved = max(self._most_reserved, int(statistics["reserved_bytes.all.peak"]))
        return int(statistics["allocated_bytes.all.peak"])

    def reserved(self) -> int:
        return max(self._most_reserved, int(torch.cuda.max_memory_reserved(self._device)))


@final
class CountingGauge:
    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._counter = Counter()
        self._most = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._counter = Counter()
        self._counter.add_known(self._tensors())
        self._most = self._counter.now
        with self._counter:
            yield

    def now(self) -> int:
        return self._counter.now

    def peak(self) -> int:
        most, self._counter.peak = self._counter.peak, self._counter.now
        self._most = max(self._most, most)
        return most

    def reserved(self) -> int:
        self.peak()
        return self._most


class Counter(TorchDispatchMode):
    """Every storage made by an operation while this mode is on, from its making to its end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def add_known(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._meet(tensor, is_new=True)
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._meet(tensor, is_new=False)  # a view of one that is older than the mode is nothing new
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._meet(tensor, is_new=True)
        return out

    def _meet(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._alive:
            return
        place, size = storage._cdata, storage.nbytes() if is_new else 0

        def ends(_: Any) -> None:
            self._alive.pop(place, None)
            self.now -= size

        self._alive[place] = weakref.ref(storage, ends)
        self.now += size
        self.peak = max(self.peak, self.now)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """None for tensors that are not made of one row of memory: sparse ones."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
