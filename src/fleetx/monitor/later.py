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


@final
class OnItsWay:
    """A tensor on a GPU. It is copied in the order of the stream, into memory that the copy need not wait for."""

    def __init__(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> None:
        self._read = read
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(tensor.device))

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
