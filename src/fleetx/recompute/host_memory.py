"""Host memory for what a device is short of: buffers that are used again, and copies that run beside the device's own work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor

from ..engine.dry_run import NoHostMemory
from ..errors import first_line, warn_user

PROBE_BYTES = 64 * 2**20


class Mover(Protocol):
    """Copies between a device and host memory. They run in the order in which they were begun, so a buffer may be given to the
    next one before the last is over."""

    device: torch.device

    def buffer(self, size: int) -> Tensor:
        """So many bytes in host memory."""

    def begin(self, target: Tensor, source: Tensor) -> Any:
        """A copy that waits for all that the device was told to do so far, and for nothing later; returns a mark of its end."""

    def wait(self, mark: Any) -> None:
        """What the device is told from now on waits for the copy."""

    def bytes_per_second(self) -> float:
        """Measured, of the slower direction."""


def mover_for(device: torch.device) -> Mover | None:
    """None where the device's memory is the host's."""
    return CudaMover(device) if device.type == "cuda" else None


def warn_of_no_offload(device: torch.device) -> None:
    warn_user(
        "recompute_configs[\"offload\"] moves inputs of recomputed blocks from a GPU's memory to the host's. This device is the "
        f"{device.type}, whose memory is the host's: there is nothing to move, and training goes on without it.",
    )


@final
class CudaMover:
    """One stream for both directions: that is what keeps copies in order."""

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
        """The second copy's: the first one finds pages that nobody has touched."""
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
    """Buffers in host memory. There are never more of them than were in use at one time."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._idle: list[Tensor] = []
        self.host_bytes = 0
        """Of all buffers there are."""

    @property
    def idle_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._idle)

    def take(self, size: int) -> Tensor:
        """At least so many bytes: the smallest idle buffer that has them, else a new one in the place of the largest idle one."""
        enough = [buffer for buffer in self._idle if buffer.nbytes >= size]
        if enough:
            return self._without(min(enough, key=lambda buffer: buffer.nbytes))
        if self._idle:
            self.host_bytes -= self._without(max(self._idle, key=lambda buffer: buffer.nbytes)).nbytes
        try:
            made = self._make(size)
        except RuntimeError as error:
            raise NoHostMemory(
                f'recompute_configs["offload"] asked the host for {size} bytes of pinned memory beside {self.host_bytes} that it '
                f"holds, and did not get them ({first_line(error)}). Free host memory, raise the limit on locked memory "
                '(`ulimit -l`), use a smaller batch, or leave "offload" out.'
            ) from error
        self.host_bytes += made.nbytes
        return made

    def give(self, buffer: Tensor) -> None:
        self._idle.append(buffer)

    def _without(self, buffer: Tensor) -> Tensor:
        self._idle = [other for other in self._idle if other is not buffer]
        return buffer
