"""Copy numbers from the device without waiting: requested now, read once the copy is complete."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor


class AsyncValue(Protocol):
    @property
    def is_ready(self) -> bool: ...

    def value(self) -> Any:
        """Return the value; wait for the device if it is not ready."""


@final
class ReadyValue:
    """A value that is known already."""

    is_ready = True

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value


def event_now(device: torch.device, *, enable_timing: bool = False) -> torch.Event:
    """Record an event in the device's current stream.

    torch.Event finds the stream itself, much faster than torch.cuda.current_stream, but only on the current device."""
    event = torch.Event(device, enable_timing=enable_timing)
    if device.index is None or device.index == torch.cuda.current_device():
        event.record()
    else:
        event.record(torch.cuda.current_stream(device))
    return event


@final
class DeviceValue:
    """A tensor on a GPU, copied in stream order into pinned host memory, so that the host does not wait."""

    def __init__(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> None:
        self._read = read
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._copied = event_now(tensor.device)

    @property
    def is_ready(self) -> bool:
        return bool(self._copied.query())

    def value(self) -> Any:
        self._copied.synchronize()
        return self._read(self._host)


def number(value: Any) -> AsyncValue:
    """Return a tensor with one entry, or anything that float() accepts, as a float; None if it is None or not finite."""
    if isinstance(value, Tensor):
        return read_async(value, lambda tensor: finite(float(tensor)))
    return ReadyValue(None if value is None else finite(float(value)))


def read_async(tensor: Tensor, read: Callable[[Tensor], Any]) -> AsyncValue:
    """Apply a function on the host to a copy of the tensor."""
    return DeviceValue(tensor, read) if tensor.device.type == "cuda" else ReadyValue(read(tensor.detach()))


def finite(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None
