"""Numbers on their way from the device: asked for now, read when they are here. Nobody waits for them while training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor


class Awaited(Protocol):
    @property
    def is_here(self) -> bool: ...

    def value(self) -> Any:
        """Waits, where it is not here."""


@final
class Here:
    """Known already."""

    is_here = True

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value


def event_now(device: torch.device, *, enable_timing: bool = False) -> torch.Event:
    """In the stream in which a GPU is given its work. torch.Event finds that by itself, in a fraction of the time that
    torch.cuda.current_stream takes; but it asks the device that is current."""
    event = torch.Event(device, enable_timing=enable_timing)
    if device.index is None or device.index == torch.cuda.current_device():
        event.record()
    else:
        event.record(torch.cuda.current_stream(device))
    return event


@final
class OnItsWay:
    """A tensor on a GPU. It is copied in the order of the stream, into memory that the copy need not wait for."""

    def __init__(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> None:
        self._read = read
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._copied = event_now(tensor.device)

    @property
    def is_here(self) -> bool:
        return bool(self._copied.query())

    def value(self) -> Any:
        self._copied.synchronize()
        return self._read(self._host)


def number(value: Any) -> Awaited:
    """Of a tensor with one entry, or of whatever float() takes."""
    if isinstance(value, Tensor):
        return told_of(value, lambda tensor: finite(float(tensor)))
    return Here(None if value is None else finite(float(value)))


def told_of(tensor: Tensor, read: Callable[[Tensor], Any]) -> Awaited:
    """What a function makes of a tensor, on the host."""
    return OnItsWay(tensor, read) if tensor.device.type == "cuda" else Here(read(tensor.detach()))


def finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None
