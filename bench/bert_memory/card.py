"""A card of a given size, the largest batch that fits on it, and how long a step takes there.

What is capped: all that this process holds on the device, the CUDA context and loaded kernels included. Those lie outside
torch's allocator; so they are measured once some steps were made (device memory in use, less what the allocator reserved), and
the allocator gets the rest, by `torch.cuda.set_per_process_memory_fraction`. A batch fits only if after its steps the device's
memory in use is still within the limit. Where others use the card too, what they hold is counted as ours.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

LIMIT = 32 * 2**30

Fits = Callable[[int], bool]
GROWTH = 0.02
"""Of the guess: how far beside it the next batch is tried, doubled each time until one fits and one does not."""

NEARER = (0.5, 0.5, 0.8, 0.9)
FARTHEST = 30


@dataclass
class Found:
    largest: int
    too_large: int | None
    """The smallest that was tried and did not fit; None: `most` fits."""
    trials: list[tuple[int, bool]] = field(default_factory=list)


def largest_that_fits(fits: Fits, guess: int, *, step: int, most: int) -> Found:
    """The largest multiple of `step` up to `most` that fits, 0 if none does; near `guess` few are tried."""
    found = Found(0, None)
    stride = max(step, round(guess * GROWTH) // step * step)
    batch = max(step, min(guess, most) // step * step)
    while True:
        ok = fits(batch)
        found.trials.append((batch, ok))
        found.largest = batch if ok else found.largest
        found.too_large = found.too_large if ok else batch
        if found.too_large is None and batch + step > most:
            return found
        if found.too_large is not None and found.too_large - found.largest <= step:
            return found
        if found.too_large is None:
            batch = min(batch + stride, most // step * step)
        elif found.largest == 0:
            batch = max(step, batch - stride)
        else:
            batch = (found.largest + found.too_large) // 2 // step * step
            continue
        stride *= 2


def line_through(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, float]:
    """Bytes of an empty batch, and bytes of each sentence."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] - slope * first[0], slope


def predicted(peak_of: Callable[[int], int | None], probes: Sequence[int], capacity: float) -> tuple[int, list[tuple[int, int]]]:
    """The batch whose peak would be `capacity`, and the peaks that say so; `peak_of` is None where a batch does not fit.

    A peak is the largest of several lines (the update's, the loss's, a layer's backward), and which of them is highest changes
    with the batch. So two small batches only say where to look: some more, ever nearer, are on the line that counts.
    """
    points = [(rows, peak) for rows in probes if (peak := peak_of(rows)) is not None]
    guess, too_large = _crossing(points, capacity), sys.maxsize
    for share in NEARER:
        rows = int(share * guess)
        if rows < 1.05 * points[-1][0]:
            continue
        peak = peak_of(rows)
        if peak is None:
            guess = too_large = rows
        else:
            points.append((rows, peak))
            guess = min(_crossing(points, capacity), too_large)
    return guess, points


def _crossing(points: Sequence[tuple[int, int]], capacity: float) -> int:
    intercept, slope = line_through(points[-2], points[-1])
    last = points[-1][0]
    # Where all batches so far peak at the same bytes, another line is to come.
    return max(last, min(int((capacity - intercept) / slope), FARTHEST * last)) if slope > 0 else FARTHEST * last


class Card(ABC):
    """Memory of `limit` bytes."""

    device: torch.device
    limit: int
    capacity: int
    """What the batch, model and optimizer may have of it."""

    @abstractmethod
    def settle(self) -> None:
        """After the first steps, when all that is not the allocator's is loaded."""

    @abstractmethod
    def lift(self) -> None:
        """The whole card from here on."""

    @abstractmethod
    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Around steps whose peak is wanted; running out of memory raises torch.OutOfMemoryError."""

    @abstractmethod
    def is_within(self) -> bool: ...

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Of the last watched steps; `peak` is what a prediction is made from."""

    @abstractmethod
    def clear(self) -> None:
        """Without a reference to a model: check that its memory is back."""

    @abstractmethod
    def seconds(self, step: Callable[[], object], steps: int) -> list[float]: ...


@final
class CudaCard(Card):
    LEFT_OVER = 128 * 2**20
    """cuBLAS workspaces, which stay."""

    def __init__(self, limit: int) -> None:
        self.device, self.limit = torch.device("cuda", torch.cuda.current_device()), limit
        self.capacity, self._outside, self._retries = limit, 0, 0

    def settle(self) -> None:
        torch.cuda.synchronize()
        self._outside = self._in_use() - torch.cuda.memory_reserved()
        self.capacity = self.limit - self._outside
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.capacity / torch.cuda.mem_get_info()[1]))

    def lift(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)
        self.limit = self.capacity = torch.cuda.mem_get_info()[1]

    @staticmethod
    def _in_use() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        yield
        torch.cuda.synchronize()

    def is_within(self) -> bool:
        return self._in_use() <= self.limit

    def facts(self) -> dict[str, Any]:
        return {
            "peak": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "allocator_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) - self._retries,
            "in_use": self._in_use(),
            "outside_allocator": self._outside,
            "allocator_capacity": self.capacity,
        }

    def clear(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated()
        if left > self.LEFT_OVER:
            raise SystemExit(f"{left} bytes are still allocated after everything was freed: a next trial would be judged wrongly")

    def seconds(self, step: Callable[[], object], steps: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        return [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(events)]


@final
class CountedCard(Card):
    """For a try without a GPU: its memory holds only what autograd saves, each storage once."""

    def __init__(self, limit: int) -> None:
        self.device, self.limit, self.capacity = torch.device("cpu"), limit, limit
        self._held: dict[int, tuple[int, Tensor]] = {}
        self._peak = 0

    def settle(self) -> None: ...

    def lift(self) -> None:
        self.limit = self.capacity = 2**62

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self._held, self._peak = {}, 0
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield
        self._held = {}

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._held[storage.data_ptr()] = storage.nbytes(), tensor.detach()
        self._peak = max(self._peak, sum(size for size, _ in self._held.values()))
        if self._peak > self.capacity:
            raise torch.OutOfMemoryError(f"{self._peak} bytes are saved; the card has {self.capacity}")
        return tensor

    def is_within(self) -> bool:
        return self._peak <= self.capacity

    def facts(self) -> dict[str, Any]:
        return {"peak": self._peak, "allocator_capacity": self.capacity}

    def clear(self) -> None:
        gc.collect()
        self._held = {}

    def seconds(self, step: Callable[[], object], steps: int) -> list[float]:
        taken = []
        for _ in range(steps):
            self._held = {}  # the step before has let go of them
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        return taken
