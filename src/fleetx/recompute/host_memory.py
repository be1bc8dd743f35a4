"""Provide host memory for offload: buffers that are reused, and copies that run beside the device's own work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor

from ..config.text import binary
from ..engine.dry_run import NoHostMemory
from ..errors import first_line, warn_user

PROBE_BYTES = 64 * 2**20


class Mover(Protocol):
    """Copies between a device and host memory. They run in the order in which they were begun, so a buffer may be reused for
    the next copy before the last one is over."""

    device: torch.device

    def buffer(self, size: int) -> Tensor:
        """Allocate `size` bytes in host memory."""

    def begin(self, target: Tensor, source: Tensor) -> Any:
        """Start a copy after all work queued on the device so far; return a mark of its end."""

    def wait(self, mark: Any) -> None:
        """Let work queued on the device from now on wait for the copy."""

    def bytes_per_second(self) -> float:
        """Measure the speed of the slower direction."""


def mover_for(device: torch.device) -> Mover | None:
    """Return the mover of a GPU; None where the device's memory is the host's."""
    return CudaMover(device) if device.type == "cuda" else None


def warn_of_no_offload(device: torch.device) -> None:
    """Warn that offload has no effect on this device."""
    warn_user(
        "recompute_configs[\"offload\"] moves inputs of recomputed blocks from a GPU's memory to the host's. This device is the "
        f"{device.type}, whose memory is the host's: there is nothing to move, and training goes on without it.",
    )


@final
class CudaMover:
    """Copies on a GPU, by one stream for both directions, which keeps them in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self.device)
        self._speed = 0.0

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def begin(self, target: Tensor, source: Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    def bytes_per_second(self) -> float:
        if not self._speed:
            here, there = self.buffer(PROBE_BYTES), torch.empty(PROBE_BYTES, dtype=torch.uint8, device=self.device)
            self._speed = PROBE_BYTES / max(self._seconds(here, there), self._seconds(there, here))
        return self._speed

    def _seconds(self, target: Tensor, source: Tensor) -> float:
        """Time the second of two copies: the first one may have to map pages that were never used."""
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            begun.record()
            target.copy_(source, non_blocking=True)
            ended.record()
        torch.cuda.synchronize(self.device)
        return float(begun.elapsed_time(ended)) / 1e3


@final
class Pool:
    """Buffers in host memory, never more of them than were in use at one time."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._idle: list[Tensor] = []
        self.host_bytes = 0
        """Bytes of all buffers, in use or idle."""

    @property
    def idle_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._idle)

    def take(self, size: int) -> Tensor:
        """Return at least `size` bytes: the smallest idle buffer of that size, else a new one in place of the largest idle."""
        enough = [buffer for buffer in self._idle if buffer.nbytes >= size]
        if enough:
            return self._without(min(enough, key=lambda buffer: buffer.nbytes))
        if self._idle:
            self.host_bytes -= self._without(max(self._idle, key=lambda buffer: buffer.nbytes)).nbytes
        try:
            made = self._make(size)
        except RuntimeError as error:
            raise NoHostMemory(
                f'recompute_configs["offload"] asked the host for {binary(size)} of pinned memory beside '
                f"{binary(self.host_bytes)} that it holds, and did not get them ({first_line(error)}). Free host memory, raise "
                'the limit on locked memory (`ulimit -l`), use a smaller batch, or leave "offload" out.'
            ) from error
        self.host_bytes += made.nbytes
        return made

    def give(self, buffer: Tensor) -> None:
        self._idle.append(buffer)

    def _without(self, buffer: Tensor) -> Tensor:
        self._idle = [other for other in self._idle if other is not buffer]
        return buffer
