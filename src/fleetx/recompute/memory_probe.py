"""Measure the bytes that a step has in use: by a GPU's allocator, or on a CPU by counting every storage that an operation makes.

Each storage counts once, however many tensors share it. Workspaces inside a CPU kernel are not seen.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..engine.modules.compiling import SEEN_BY_COUNTING, backend, compiled_by
from ..engine.modules.nested_tensors import tensors_in
from ..errors import ConfigError


class MemoryProbe(Protocol):
    """Measures all bytes in use, including those from before the step."""

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Measure the block."""

    def now(self) -> int:
        """Return the bytes in use now."""

    def peak(self) -> int:
        """Return the most bytes in use since the last call of this method or of `watching`."""

    def reserved(self) -> int:
        """Return the most bytes that the allocator held since `watching` began; on a CPU the most in use."""


def memory_probe_for(device: torch.device, tensors: Callable[[], Iterable[Tensor]]) -> MemoryProbe:
    """Return the probe of a device; `tensors` lists those that outlive a step, where the allocator does not count them."""
    return AllocatorProbe(device) if device.type == "cuda" else CountingProbe(tensors)


def require_countable(model: nn.Module, device: torch.device) -> None:
    """Refuse what `strategy.compile` makes where tensors are counted as torch's operations make them: its own are not seen."""
    is_compiled = any(compiled_by(module) == "strategy" for module in model.modules())
    if is_compiled and device.type == "cpu" and backend() not in SEEN_BY_COUNTING:
        raise ConfigError(
            "a budget on a CPU is kept to by counting the tensors that torch's operations make; compiled code makes its own, "
            "unseen. Leave strategy.compile out, or compute on a GPU."
        )


@final
class AllocatorProbe:
    """Reads the statistics of torch's allocator on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._most_reserved = device, 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        gc.collect()  # garbage in cycles would be counted, or freed in the middle
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # memory held for an earlier step would be counted as held
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
class CountingProbe:
    """Counts storages on a CPU."""

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
    """Counts every storage made by an operation while this mode is on, until it is freed."""

    def __init__(self, *, counts_fakes: bool = False) -> None:
        """Begin at 0. `counts_fakes`: tensors without data, too, by the size that their data would have."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts_fakes = counts_fakes
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it does without this mode; torch would leave it out."""
        return True

    def add_known(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._meet(tensor, is_new=True)
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._meet(tensor, is_new=False)  # a view of an older storage is not new memory
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._meet(tensor, is_new=True)
        return out

    def _meet(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._alive:
            return
        if storage.device.type == "meta" and not self._counts_fakes:  # of a trace, without memory
            return
        place, size = storage._cdata, storage.nbytes() if is_new else 0

        def ends(_: Any) -> None:
            self._alive.pop(place, None)
            self.now -= size

        self._alive[place] = weakref.ref(storage, ends)
        self.now += size
        self.peak = max(self.peak, self.now)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the tensor's storage; None for one without a single storage, such as a sparse tensor."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
